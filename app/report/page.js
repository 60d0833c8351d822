// Draws the report's charts when they come into view, in the page's scheme, and saves them. Nothing is fetched.
(() => {
    const themes = JSON.parse(document.getElementById('themes').textContent);
    const dark = matchMedia('(prefers-color-scheme: dark)');
    const root = document.documentElement;
    const scheme = () => root.dataset.scheme || (dark.matches ? 'dark' : 'light');
    const charts = [...document.querySelectorAll('.chart')];
    async function chartOf(node) {
        const text = atob(JSON.parse(document.getElementById(node.dataset.name).textContent));
        const stream = new Blob([Uint8Array.from(text, letter => letter.charCodeAt(0))]).stream();
        return new Response(stream.pipeThrough(new DecompressionStream('gzip'))).json();
    }
    const drawn = new Map();

    function draw(node) {
        const wanted = scheme();
        if (drawn.get(node)?.scheme === wanted) return drawn.get(node).view;
        const old = drawn.get(node);
        const options = { mode: 'vega-lite', ast: true, actions: false, renderer: 'svg', logLevel: 1, tooltip: { theme: wanted } };
        const view = (old ? old.view : Promise.resolve())
            .then(before => before && before.finalize())
            .then(() => chartOf(node))
            .then(({ spec }) => vegaEmbed(node, { ...spec, config: themes[wanted].config }, options))
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
