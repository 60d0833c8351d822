// The menu of a chart or a table of the app: the chart as SVG or PNG, other files that the app makes, and pinning.
// components.py puts MENU and picture.js, which defines save and savePicture, in front of this file.
// root: has the menu, and the chart in .plot.
export function exportMenu(root, data, setTriggerValue) {
    const part = name => root.querySelector(`.exports .${name}`);
    const [menu, saves] = [part('menu'), part('saves')];
    menu.popoverTargetElement = saves; // by its id, it would be that of the first menu of several
    saves.ontoggle = ({ newState }) => {
        if (newState !== 'open') return;
        const { right, bottom } = menu.getBoundingClientRect();
        const { clientWidth, clientHeight } = document.documentElement;
        const top = Math.max(0, Math.min(bottom + 2, clientHeight - saves.offsetHeight - 4));
        Object.assign(saves.style, { right: `${clientWidth - right}px`, top: `${top}px` });
    };
    if (data.table) menu.ariaLabel = menu.title = 'Save the table';
    const on = (button, act) => button.onclick = () => { saves.hidePopover(); act(); };
    for (const button of saves.querySelectorAll('.picture')) {
        button.hidden = data.table;
        on(button, () => {
            const chart = root.querySelector('.plot svg.marks');
            const { backgroundColor, color, fontFamily } = getComputedStyle(document.querySelector('[data-testid=stApp]'));
            const colors = { ground: backgroundColor, text: color, font: fontFamily };
            if (chart) savePicture(button.dataset.kind, chart, data.caption, colors, data.name);
        });
    }
    part('paper').hidden = data.table;
    for (const button of saves.querySelectorAll('[data-end]')) on(button, () => {
        menu.dataset.asked = crypto.randomUUID?.() ?? `${Math.random()}`;
        setTriggerValue('saved', { chart: data.chart, end: button.dataset.end, id: menu.dataset.asked });
    });
    if (data.saved && data.saved.id === menu.dataset.asked) {
        delete menu.dataset.asked;
        const { content, type, end } = data.saved;
        save(Uint8Array.from(atob(content), letter => letter.charCodeAt(0)), type, `${data.name}${end}`);
    }
    saves.querySelector('p').innerText = data.gestures.join('\n');
    part('pin').hidden = !data.pin;
    on(part('pin'), () => setTriggerValue('pinned', data.chart ?? true));
}
