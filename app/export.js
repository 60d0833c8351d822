// The menu of a chart of the app: the chart as SVG or PNG, its numbers as CSV, a pin. picture.js stands before.
export default function ({ data, parentElement, setTriggerValue }) {
    const part = name => parentElement.querySelector(`.exports .${name}`);
    const [menu, saves] = [part('menu'), part('saves')];
    saves.onbeforetoggle = () => {
        const { right, bottom } = menu.getBoundingClientRect();
        Object.assign(saves.style, { right: `${document.documentElement.clientWidth - right}px`, top: `${bottom + 2}px` });
    };
    const on = (name, act) => part(name).onclick = () => { saves.hidePopover(); act(); };
    for (const kind of ['png', 'svg']) on(kind, () => {
        const chart = document.querySelector(`.st-key-${CSS.escape(data.chart)} svg.marks`);
        const { backgroundColor, color, fontFamily } = getComputedStyle(document.querySelector('[data-testid=stApp]'));
        if (chart) savePicture(kind, chart, data.caption, { ground: backgroundColor, text: color, font: fontFamily }, data.name);
    });
    on('csv', () => save(data.csv, 'text/csv', `${data.name}.csv`));
    saves.querySelector('p').innerText = data.gestures.join('\n');
    part('pin').hidden = !data.pin;
    on('pin', () => setTriggerValue('pinned', true));
}
