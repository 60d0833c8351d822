// Draws the report's charts when they come into view, in the page's color scheme, and saves them. It makes no network requests.
(() => {
    const themes = JSON.parse(document.getElementById('themes').textContent);
    const dark = matchMedia('(prefers-color-scheme: dark)');
    const root = document.documentElement;
    // Printed charts use the light theme; page.css sets the width of the paper.
    const scheme = () => root.dataset.print ? 'light' : root.dataset.scheme || (dark.matches ? 'dark' : 'light');
    const charts = [...document.querySelectorAll('.chart')];
    async function chartOf(node) {
        const text = atob(JSON.parse(document.getElementById(node.dataset.name).textContent));
        const stream = new Blob([Uint8Array.from(text, letter => letter.charCodeAt(0))]).stream();
        return new Response(stream.pipeThrough(new DecompressionStream('gzip'))).json();
    }
    const drawn = new Map();

    function draw(node) {
        const theme = scheme();
        const wanted = root.dataset.print ? 'print' : theme;
        if (drawn.get(node)?.scheme === wanted) return drawn.get(node).view;
        const old = drawn.get(node);
        const options = { mode: 'vega-lite', ast: true, actions: false, renderer: 'svg', logLevel: 1, tooltip: { theme } };
        const view = (old ? old.view : Promise.resolve())
            .then(before => before && before.finalize())
            .then(() => chartOf(node))
            .then(({ spec }) => vegaEmbed(node, { ...spec, config: themes[theme].config }, options))
            .then(result => result.view)
            .catch(error => { node.textContent = `This chart cannot be drawn: ${error.message}`; throw error; });
        drawn.set(node, { scheme: wanted, view });
        return view;
    }

    document.addEventListener('click', async event => {
        const kind = event.target.closest('button[data-save]')?.dataset.save;
        if (!kind) return;
        const node = event.target.closest('figure').querySelector('.chart');
        const [{ caption, csv }, { name }] = [await chartOf(node), node.dataset];
        if (kind === 'csv') return save(csv, 'text/csv', `${name}.csv`);
        await draw(node);
        const { card, quiet } = themes[scheme()];
        await savePicture(kind, node.querySelector('svg.marks'), caption, { ground: card, text: quiet, font: themes.font }, name);
    });

    const near = new Set();
    const seen = new IntersectionObserver(entries => {
        for (const { target, isIntersecting } of entries) {
            near[isIntersecting ? 'add' : 'delete'](target);
            if (isIntersecting) draw(target);
        }
    }, { rootMargin: '800px' });
    charts.forEach(node => seen.observe(node));
    const again = () => near.forEach(draw);
    dark.addEventListener('change', again);
    document.getElementById('scheme').addEventListener('click', () => {
        root.dataset.scheme = scheme() === 'dark' ? 'light' : 'dark';
        again();
    });
    // A browser prints only what has been drawn: the page draws every chart before it calls print().
    async function drawForPrint() {
        root.dataset.print = 'yes';
        await Promise.allSettled(charts.map(draw));
    }
    const printed = async () => { await drawForPrint(); print(); };
    document.getElementById('print').addEventListener('click', printed);
    addEventListener('keydown', event => {
        if (event.key.toLowerCase() !== 'p' || event.shiftKey || event.altKey) return;
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        printed();
    });
    // Printing from the browser's menu does not wait: only charts drawn in time are printed. The print layout still applies.
    addEventListener('beforeprint', drawForPrint);
    addEventListener('afterprint', () => { delete root.dataset.print; again(); });
    // For scripts and tests: a chart's view.
    window.binade = { view: name => draw(charts.find(c => c.dataset.name === name)) };
})();
