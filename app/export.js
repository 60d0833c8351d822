// The menu of a chart or a table of the app: the chart as SVG or PNG, other files that the app makes, and pinning.
// `show._exporter` puts picture.js, which defines save and savePicture, in front of this file.
export default function ({ data, parentElement, setTriggerValue }) {
    const part = name => parentElement.querySelector(`.exports .${name}`);
    const [menu, saves] = [part('menu'), part('saves')];
    saves.ontoggle = ({ newState }) => {
        if (newState !== 'open') return;
        const { right, bottom } = menu.getBoundingClientRect();
        const { clientWidth, clientHeight } = document.documentElement;
        const top = Math.max(0, Math.min(bottom + 2, clientHeight - saves.offsetHeight - 4));
        Object.assign(saves.style, { right: `${clientWidth - right}px`, top: `${top}px` });
    };
    if (!data.chart) menu.ariaLabel = menu.title = 'Save the table';
    const on = (button, act) => button.onclick = () => { saves.hidePopover(); act(); };
    for (const button of saves.querySelectorAll('.picture')) {
        button.hidden = !data.chart;
        on(button, () => {
            const chart = document.querySelector(`.st-key-${CSS.escape(data.chart)} svg.marks`);
            const { backgroundColor, color, fontFamily } = getComputedStyle(document.querySelector('[data-testid=stApp]'));
            const colors = { ground: backgroundColor, text: color, font: fontFamily };
            if (chart) savePicture(button.dataset.kind, chart, data.caption, colors, data.name);
        });
    }
    part('paper').hidden = !data.chart;
    for (const button of saves.querySelectorAll('[data-end]')) on(button, () => {
        menu.dataset.asked = crypto.randomUUID?.() ?? `${Math.random()}`;
        setTriggerValue('saved', { end: button.dataset.end, id: menu.dataset.asked });
    });
    if (data.saved && data.saved.id === menu.dataset.asked) {
        delete menu.dataset.asked;
        const { content, type, end } = data.saved;
        save(Uint8Array.from(atob(content), letter => letter.charCodeAt(0)), type, `${data.name}${end}`);
    }
    saves.querySelector('p').innerText = data.gestures.join('\n');
    part('pin').hidden = !data.pin;
    on(part('pin'), () => setTriggerValue('pinned', true));
}
