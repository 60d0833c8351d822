// Saves a chart from the page: the SVG that is shown, with the caption beneath it, as SVG or PNG, and its numbers as CSV.
export default function ({ data, parentElement, setTriggerValue }) {
    const root = parentElement.querySelector('.exports');
    const save = (url, ending) => {
        const link = document.createElement('a');
        link.href = url;
        link.download = data.name + ending;
        link.click();
    };
    const picture = () => {
        const shown = document.querySelector('.st-key-' + CSS.escape(data.chart) + ' svg.marks');
        if (!shown) return null;
        const box = shown.viewBox.baseVal;
        const size = box && box.width ? [box.width, box.height] : [shown.clientWidth, shown.clientHeight];
        const app = getComputedStyle(document.querySelector('[data-testid=stApp]'));
        const letters = Math.max(40, Math.floor(size[0] / 6));
        const lines = [];
        for (const part of data.caption.split('\n')) {
            let line = '';
            for (const word of part.split(' ')) {
                if (line && (line + ' ' + word).length > letters) { lines.push(line); line = word; }
                else line = line ? line + ' ' + word : word;
            }
            if (line) lines.push(line);
        }
        const height = size[1] + 16 * lines.length + 12;
        const space = 'http://www.w3.org/2000/svg';
        const svg = document.createElementNS(space, 'svg');
        const set = (node, values) => Object.entries(values).forEach(([k, v]) => node.setAttribute(k, v));
        set(svg, { xmlns: space, width: size[0], height, viewBox: `0 0 ${size[0]} ${height}` });
        const back = document.createElementNS(space, 'rect');
        set(back, { width: size[0], height, fill: app.backgroundColor });
        svg.append(back);
        const copy = shown.cloneNode(true);
        set(copy, { width: size[0], height: size[1] });
        svg.append(copy);
        lines.forEach((line, index) => {
            const text = document.createElementNS(space, 'text');
            set(text, { x: 8, y: size[1] + 16 * (index + 1), fill: app.color, 'font-size': 11,
                        'font-family': app.fontFamily });
            text.textContent = line;
            svg.append(text);
        });
        return { text: new XMLSerializer().serializeToString(svg), width: size[0], height };
    };
    const url = made => 'data:image/svg+xml;charset=utf-8,' + encodeURIComponent(made.text);
    root.querySelector('.svg').onclick = () => { const made = picture(); if (made) save(url(made), '.svg'); };
    root.querySelector('.png').onclick = () => {
        const made = picture();
        if (!made) return;
        const image = new Image();
        image.onload = () => {
            const canvas = document.createElement('canvas');
            canvas.width = 2 * made.width;
            canvas.height = 2 * made.height;
            canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
            save(canvas.toDataURL('image/png'), '.png');
        };
        image.src = url(made);
    };
    const pin = root.querySelector('.pin');
    pin.hidden = !data.pin;
    pin.onclick = () => setTriggerValue('pinned', true);
    root.querySelector('.csv').onclick = () => {
        save('data:text/csv;charset=utf-8,' + encodeURIComponent(data.csv), '.csv');
    };
}
