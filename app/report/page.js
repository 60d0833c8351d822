// Draws the report's charts when they come into view, in the page's scheme, and saves them. Nothing is fetched.
(() => {
    const themes = JSON.parse(document.getElementById('themes').textContent);
    const dark = matchMedia('(prefers-color-scheme: dark)');
    const root = document.documentElement;
    const scheme = () => root.dataset.scheme || (dark.matches ? 'dark' : 'light');
    const charts = [...document.querySelectorAll('.chart')];
    const plate = node => JSON.parse(document.getElementById(node.dataset.plate).textContent);
    const drawn = new Map();

    function draw(node) {
        const wanted = scheme();
        if (drawn.get(node)?.scheme === wanted) return drawn.get(node).view;
        const old = drawn.get(node);
        const spec = { ...plate(node).spec, config: themes[wanted].config };
        const options = { mode: 'vega-lite', ast: true, actions: false, renderer: 'svg', logLevel: 1, tooltip: { theme: wanted } };
        const view = (old ? old.view : Promise.resolve())
            .then(before => before && before.finalize())
            .then(() => vegaEmbed(node, spec, options))
            .then(result => result.view)
            .catch(error => { node.textContent = `This chart cannot be drawn: ${error.message}`; throw error; });
        drawn.set(node, { scheme: wanted, view });
        return view;
    }

    function save(content, type, name) {
        const link = document.createElement('a');
        link.href = URL.createObjectURL(new Blob([content], { type }));
        link.download = name;
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    }

    // The chart with its caption beneath, as text of an SVG.
    async function picture(node) {
        const { caption } = plate(node);
        const inner = new DOMParser().parseFromString(await (await draw(node)).toSVG(), 'image/svg+xml').documentElement;
        const [width, height] = ['width', 'height'].map(side => parseFloat(inner.getAttribute(side)));
        const lines = [];
        for (const part of caption.split('\n')) {
            let line = '';
            for (const word of part.split(' ')) {
                const longer = line ? `${line} ${word}` : word;
                if (line && longer.length > width / 5.8) { lines.push(line); line = word; } else line = longer;
            }
            lines.push(line);
        }
        const full = height + 16 * lines.length + 12;
        const space = 'http://www.w3.org/2000/svg';
        const make = (name, values) => {
            const made = document.createElementNS(space, name);
            Object.entries(values).forEach(([key, value]) => made.setAttribute(key, value));
            return made;
        };
        const svg = make('svg', { xmlns: space, width, height: full, viewBox: `0 0 ${width} ${full}` });
        svg.append(make('rect', { width, height: full, fill: themes[scheme()].card }), inner);
        lines.forEach((line, index) => {
            const text = make('text', { x: 12, y: height + 16 * index + 8, 'font-size': 11.5,
                                        fill: themes[scheme()].quiet, 'font-family': themes.font });
            text.textContent = line;
            svg.append(text);
        });
        return { text: new XMLSerializer().serializeToString(svg), width, height: full };
    }

    const savers = {
        svg: async (node, name) => save((await picture(node)).text, 'image/svg+xml', `${name}.svg`),
        csv: async (node, name) => save(plate(node).csv, 'text/csv', `${name}.csv`),
        png: async (node, name) => {
            const made = await picture(node);
            const image = new Image();
            await new Promise((done, failed) => {
                [image.onload, image.onerror] = [done, failed];
                image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(made.text)}`;
            });
            const canvas = document.createElement('canvas');
            [canvas.width, canvas.height] = [2 * made.width, 2 * made.height];
            canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
            canvas.toBlob(blob => save(blob, 'image/png', `${name}.png`));
        },
    };

    document.addEventListener('click', event => {
        const button = event.target.closest('button[data-save]');
        if (!button) return;
        const node = button.closest('figure').querySelector('.chart');
        savers[button.dataset.save](node, node.dataset.name);
    });

    const seen = new IntersectionObserver(entries => {
        entries.filter(entry => entry.isIntersecting).forEach(entry => draw(entry.target));
    }, { rootMargin: '800px' });
    charts.forEach(node => seen.observe(node));
    const again = () => { for (const node of drawn.keys()) draw(node); };
    dark.addEventListener('change', again);
    document.getElementById('scheme').addEventListener('click', () => {
        root.dataset.scheme = scheme() === 'dark' ? 'light' : 'dark';
        again();
    });
    addEventListener('beforeprint', () => charts.forEach(draw));
    // For scripts and tests: every chart drawn, and its view.
    window.binade = { drawAll: () => Promise.all(charts.map(draw)), view: name => draw(charts.find(c => c.dataset.name === name)) };
})();
