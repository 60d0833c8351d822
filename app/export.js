// The exports beneath a chart of the app: the chart as SVG or PNG, its numbers as CSV, a pin. picture.js stands before.
export default function ({ data, parentElement, setTriggerValue }) {
    const button = name => parentElement.querySelector(`.exports .${name}`);
    for (const kind of ['png', 'svg']) {
        button(kind).onclick = () => {
            const chart = document.querySelector(`.st-key-${CSS.escape(data.chart)} svg.marks`);
            const { backgroundColor, color, fontFamily } = getComputedStyle(document.querySelector('[data-testid=stApp]'));
            if (chart) savePicture(kind, chart, data.caption, { ground: backgroundColor, text: color, font: fontFamily }, data.name);
        };
    }
    button('csv').onclick = () => save(data.csv, 'text/csv', `${data.name}.csv`);
    button('pin').hidden = !data.pin;
    button('pin').onclick = () => setTriggerValue('pinned', true);
}
