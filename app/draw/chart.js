// A chart of the app with its export menu. Python sends `data`: `spec`, a Vega-Lite specification as text that names its
// tables d0, d1 …, and `tables`, their columns. While a page shows the chart its view stays: if only the tables have
// changed, they are replaced in it. Python hears of `selected`, {name of the selection, what it selects}, of `saved` and
// of `pinned`. components.py puts picture.js, export.js, MENU, THEMES and VEGA in front of this file.
const REST = 200; // milliseconds after which a range has come to rest
const isObject = value => value !== null && typeof value === 'object';

function rowsOf({ columns, length }) {
    const names = Object.keys(columns);
    return Array.from({ length }, (_, index) => Object.fromEntries(names.map(name => [name, columns[name][index]])));
}

export function isDark() {
    const { backgroundColor } = getComputedStyle(document.querySelector('[data-testid=stApp]'));
    const [r, g, b] = backgroundColor.match(/[\d.]+/g);
    return 0.3 * r + 0.59 * g + 0.11 * b < 128;
}

// How a page differs from a report: no card behind a chart, a smaller title.
const onPage = config => ({ ...config, background: 'transparent', padding: 5,
    title: { ...config.title, fontSize: 14, anchor: 'start', offset: 10 } });

function merged(under, over) {
    if (!isObject(under) || !isObject(over) || Array.isArray(over)) return over === undefined ? under : over;
    const names = new Set([...Object.keys(under), ...Object.keys(over)]);
    return Object.fromEntries([...names].map(name => [name, merged(under[name], over[name])]));
}

// What a selection selects: values of a point's fields, or the range of an interval by field.
function selectedBy(value) {
    if (value.vlPoint) return value.vlPoint.or;
    return Object.fromEntries(Object.entries(value).filter(([, range]) => Array.isArray(range)));
}

const isFitted = spec => !['concat', 'hconcat', 'vconcat', 'facet', 'spec'].some(name => name in spec);

export { MENU };

// A view in a node that stays while its specification does. What is asked for while it draws is drawn next.
export class Plot {
    constructor(root, server) {
        Object.assign(this, { root, node: root.querySelector('.plot'), server, busy: false });
        const release = () => { this.isPressed = false; };
        this.node.addEventListener('pointerdown', () => {
            this.isPressed = this.isGesture = true;
            for (const end of ['pointerup', 'pointercancel']) window.addEventListener(end, release, { capture: true, once: true });
        });
    }

    // wanted: { spec, tables, height, alt, selections, marked }; hear: called with (name, what it selects).
    show(wanted, hear = () => {}) {
        Object.assign(this, { wanted, hear });
        this.root.style.setProperty('--height', `${wanted.height}px`);
        this.watched ??= this.watch();
        if (!this.busy) this.draw();
    }

    async draw() {
        this.busy = true;
        this.root.dataset.state = 'drawing';
        try {
            while (this.shown !== this.wanted) {
                const { wanted } = this, dark = isDark();
                const key = JSON.stringify([wanted.spec, wanted.height, wanted.marked, Object.keys(wanted.tables), dark]);
                if (this.key === key) await this.replace(wanted.tables);
                else await this.build(wanted, dark);
                this.describe(wanted.alt);
                Object.assign(this, { key, dark, shown: wanted, tables: wanted.tables });
            }
        } catch (error) {
            Object.assign(this, { key: '', shown: this.wanted });
            this.node.textContent = `This chart cannot be drawn: ${error.message}`;
            throw error;
        } finally {
            this.busy = false;
            this.root.dataset.state = 'drawn';
        }
    }

    async build({ spec, tables, height, selections }, dark) {
        if (!window.vegaEmbed) await (window.binadeVega ??= import(this.server + VEGA));
        const lite = JSON.parse(spec), theme = dark ? 'dark' : 'light';
        this.fitted = isFitted(lite);
        this.node.classList.toggle('fitted', this.fitted);
        const size = this.fitted ? { width: this.node.clientWidth || 600, height, autosize: { type: 'fit', contains: 'padding' } } : {};
        const datasets = Object.fromEntries(Object.entries(tables).map(([name, table]) => [name, rowsOf(table)]));
        const config = merged(onPage(THEMES[theme]), lite.config ?? {});
        this.view?.finalize();
        const options = { mode: 'vega-lite', actions: false, renderer: 'svg', tooltip: { theme }, logLevel: 1 };
        ({ view: this.view } = await window.vegaEmbed(this.node, { ...lite, ...size, config, datasets }, options));
        for (const name of selections) this.listen(name);
    }

    // Vega names the picture and what is around it.
    describe(alt) {
        this.view.description(alt);
        this.node.querySelector('svg').setAttribute('aria-label', alt);
    }

    replace(tables) {
        for (const [name, table] of Object.entries(tables)) {
            if (table !== this.tables[name] && JSON.stringify(table) !== JSON.stringify(this.tables[name])) {
                this.view.data(name, rowsOf(table));
            }
        }
        return this.view.runAsync();
    }

    // A click is heard at once; a range when the button is up and the range has come to rest, since an answer to half
    // of a drag would change what is dragged over. A range that stays while the data move has other ends, but nobody
    // has dragged it.
    listen(name) {
        let timer = 0;
        const hear = selected => {
            if (this.isPressed) timer = setTimeout(hear, REST, selected);
            else {
                this.isGesture = false;
                this.hear(name, selected);
            }
        };
        this.view.addSignalListener(name, (_, value) => {
            const selected = selectedBy(value ?? {}), isClick = Array.isArray(selected);
            if (!isClick && !this.isGesture) return;
            clearTimeout(timer);
            if (Object.keys(selected).length) timer = setTimeout(hear, isClick ? 0 : REST, selected);
        });
    }

    // Fit it to its place, and draw it again in the other color scheme.
    watch() {
        const resized = new ResizeObserver(() => {
            const width = this.node.clientWidth;
            if (this.view && this.fitted && width && this.view.width() !== width) this.view.width(width).runAsync();
        });
        resized.observe(this.node);
        const themed = new MutationObserver(() => {
            if (this.shown && isDark() !== this.dark) this.show({ ...this.wanted }, this.hear);
        });
        themed.observe(document.querySelector('[data-testid=stApp]'), { attributes: true, attributeFilter: ['class'] });
        return () => { resized.disconnect(); themed.disconnect(); this.watched = null; };
    }

    leave() {
        this.watched?.();
    }
}

export default function ({ data, parentElement, setTriggerValue }, server) {
    const root = parentElement.querySelector('.chart');
    if (!root.childElementCount) root.innerHTML = `<div class="plot"></div>${MENU}`;
    const plot = root.plot ??= new Plot(root, server);
    root.classList.toggle('no-y-title', data.untitled);
    exportMenu(root, data, setTriggerValue);
    plot.show(data, (name, selected) => setTriggerValue('selected', { name, selected }));
    return () => plot.leave();
}
