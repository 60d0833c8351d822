// Explore: the tensors, worst first, and three charts of those that are ticked. Python sends `data` (see page.py): the
// rows, the dots of the formats and the charts' specifications once for each list of tensors, `curves` of tensors in
// pieces, and `drawn`, what it computed for the ticks that it knows. A tick, other values or another axis are drawn here
// at once and told later. Python hears of `chosen`, `needs`, `set`, `open`, `runs`, `saved` and `pinned`.
import { MENU, Plot, exportMenu } from './chart.js';

const PAUSE = 700; // milliseconds until Python hears of ticks
const ROW = 26; // pixels
const AHEAD = 12; // rows that are made above and below those in view

function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
        if (key === 'text') made.textContent = value;
        else if (key.startsWith('on')) made[key] = value;
        else if (value === true) made.setAttribute(key, '');
        else if (value !== false && value !== undefined && value !== null) made.setAttribute(key, value);
    }
    made.append(...children.filter(child => child !== null));
    return made;
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
// log₂ of the magnitude at which a bin begins. steps: of the bins of a binade.
const edgeOf = (steps, index) => Math.floor(index / steps.length) + steps.at(index % steps.length);
const table = columns => ({ columns, length: Object.values(columns)[0].length });

class Explore {
    constructor(root, scripts) {
        Object.assign(this, { root, scripts, curves: {}, ticked: [], timer: 0, key: '' });
        this.left = element('div', { class: 'left' });
        this.controls = element('div', { class: 'controls', role: 'group', 'aria-label': 'How values are compared' });
        this.legend = element('div', { class: 'legend', role: 'list', 'aria-label': 'What is drawn' });
        this.said = element('div', { class: 'note', 'aria-live': 'polite' });
        this.formatNote = element('div', { class: 'note' });
        this.places = Object.fromEntries(['histogram', 'qq', 'formats'].map(name => [name, this.place(name)]));
        this.upper = element('div', { class: 'two' }, this.places.histogram.box, this.places.qq.box);
        this.panels = element('div', { class: 'panels' });
        this.single = element('div', {}, this.legend, this.upper, this.said, this.places.formats.box, this.formatNote);
        root.append(this.left, element('div', { class: 'right' }, this.controls, this.single, this.panels));
    }

    place(name) {
        const title = element('h4');
        const chart = element('div', { class: 'chart', 'data-state': 'drawing' });
        chart.innerHTML = `<div class="plot"></div>${MENU}`;
        const axis = element('div', { class: 'axis' }), counts = element('div', { class: 'counts' });
        return { name, title, axis, counts, chart, box: element('section', { class: `card ${name}` }, title, chart, axis, counts), plot: new Plot(chart, this.scripts) };
    }

    receive(component) {
        this.component = component;
        const { data } = component;
        this.data = { ...(data.key === this.key ? this.data : {}), ...data };
        if (!this.data.rows) { // the browser has lost what Python thinks it has
            component.setTriggerValue('needs', ['board']);
            return;
        }
        const isNew = data.key !== this.key || data.rows;
        if (data.key !== this.key || data.law !== this.law) Object.assign(this, { curves: {}, asked: new Set() });
        Object.assign(this, { key: data.key, law: data.law });
        if (data.rows) this.exact = {};
        if (data.drawn) this.data.drawn = { ...data.drawn, groups: data.drawn.groups.map(group => this.kept(group)) };
        Object.assign(this.curves, data.curves ?? {});
        if (!this.timer) Object.assign(this, { ticked: [...data.ticked], shown: { ...data.shown } });
        this.drawControls();
        if (isNew) this.drawList();
        this.root.classList.toggle('paneled', Boolean(data.panels));
        if (data.panels) this.drawPanels(data.panels);
        this.drawTicks();
        this.draw();
        if (!data.panels && isNew) this.drawFormats();
        if (data.curves && !isNew) this.ask(this.inView, 400); // the next piece
    }

    // A curve that Python has sent before comes by its kind alone.
    kept(group) {
        if (!group.kind) return group;
        if (group.shares) this.exact[group.kind] = group;
        return { ...this.exact[group.kind], ...group };
    }

    tell(name, value) { this.component.setTriggerValue(name, value); }

    // Of what the user has chosen, Python hears when they pause; the address follows at once.
    later() {
        const address = new URL(location.href);
        for (const name of ['tensor', 'values', 'axis']) address.searchParams.delete(name);
        this.ticked.forEach(id => address.searchParams.append('tensor', id));
        for (const name of ['values', 'axis']) {
            const first = this.data.controls.find(control => control.name === name).options[0][0];
            if (this.shown[name] !== first) address.searchParams.set(name, this.shown[name]);
        }
        history.pushState(history.state, '', address); // as any change of the view, so that Back undoes it
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.flush(), PAUSE);
    }

    flush() {
        clearTimeout(this.timer);
        this.timer = 0;
        this.tell('chosen', { tensor: this.ticked, values: this.shown.values, axis: this.shown.axis });
    }

    // The list

    drawList() {
        const { rows, title, unit, within, note, pages } = this.data;
        const button = (text, act, attributes = {}) => element('button', { type: 'button', class: 'link', text, onclick: act, ...attributes });
        this.actions = element('div', { class: 'actions' });
        const head = element('div', { class: 'tools' }, element('span', { text: title, class: 'quiet' }),
            within ? button(`${within} ✕`, () => this.tell('set', ['delta', null]), { title: 'Show the operands outside this range too' }) : null, this.actions);
        const of = rows.of.some(Boolean);
        const columns = [['', 'box'], ['Tensor', 'name'], ['GEMM', 'gemm'], ['SQNR', 'number'], ['Δ', 'number']].concat(of ? [['Of', 'of']] : []);
        const titles = { GEMM: 'In which the format loses most of the tensor', SQNR: unit,
            'Δ': 'SQNR minus that of normally distributed values in the same format, dB', Of: 'In what tensors of this name differ' };
        // Rows that come again keep the place in the list, the focus and the scroll position.
        const before = this.order && [...this.order.keys()][this.at], kept = before !== undefined && rows.id[this.at] === before;
        const scrollTop = kept ? this.scroll.scrollTop : 0, focused = kept && this.body.contains(this.root.getRootNode().activeElement);
        this.body = element('tbody');
        // A row of the longest texts of each column gives the columns their widths, whichever rows are in view.
        const longest = texts => texts.reduce((a, b) => (b.length > a.length ? b : a), '');
        const widest = element('tr', { class: 'widest', 'aria-hidden': 'true' }, element('td'), ...['name', 'gemm', 'sqnr', 'delta', ...(of ? ['of'] : [])]
            .map(name => element('td', { text: longest(rows[name]) })));
        const head2 = element('thead', {}, element('tr', {}, ...columns.map(([text, kind]) => element('th', { text, class: kind, scope: 'col', title: titles[text] }))), widest);
        this.grid = element('table', { role: 'grid', 'aria-multiselectable': 'true', 'aria-label': title, 'aria-rowcount': rows.id.length }, head2, this.body);
        this.scroll = element('div', { class: 'scroll' }, this.grid);
        this.scroll.onscroll = () => this.drawRows();
        if (!kept) this.at = Math.max(0, rows.id.indexOf(this.ticked[0]));
        this.body.onclick = event => {
            const index = event.target.closest('tr')?.dataset.index;
            if (index !== undefined) { this.at = Number(index); this.tick(rows.id[this.at]); }
        };
        this.body.onkeydown = event => this.onKey(event);
        const foot = element('div', { class: 'tools' }, note ? element('span', { text: note, class: 'quiet' }) : null,
            ...(note ? [['Previous', pages[0]], ['Next', pages[1]]].map(([text, to]) => button(text, () => this.tell('set', ['after', to || null]), { disabled: to === null })) : []));
        this.left.replaceChildren(head, this.scroll, foot);
        this.order = new Map(rows.id.map((id, index) => [id, index]));
        this.made = '';
        this.scroll.scrollTop = scrollTop;
        this.drawRows();
        if (focused) this.body.querySelector(`[data-index="${this.at}"]`)?.focus({ preventScroll: true });
    }

    drawRows() {
        const { rows } = this.data, count = rows.id.length;
        const first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - AHEAD);
        const last = Math.min(count, first + Math.ceil((this.scroll.clientHeight || 600) / ROW) + 2 * AHEAD);
        const made = `${first}-${last}-${this.ticked}-${this.at}`;
        if (made === this.made) return;
        this.made = made;
        const focused = this.body.contains(this.root.getRootNode().activeElement);
        const ticked = new Set(this.ticked), gap = height => element('tr', { class: 'gap', 'aria-hidden': 'true', style: `height:${height}px` });
        const lines = [];
        for (let index = first; index < last; index += 1) {
            const on = ticked.has(rows.id[index]);
            const texts = [[rows.name[index], 'name'], [rows.gemm[index], 'gemm'], [rows.sqnr[index], 'number'],
                [rows.delta[index], rows.bad[index] ? 'number bad' : 'number'], ...(rows.of.some(Boolean) ? [[rows.of[index], 'of']] : [])];
            const box = element('input', { type: 'checkbox', tabindex: -1, 'aria-label': `${rows.name[index]} ${rows.gemm[index]}` });
            box.checked = on;
            lines.push(element('tr', { 'data-index': index, class: on ? 'on' : '', 'aria-selected': String(on), 'aria-rowindex': index + 1, tabindex: index === this.at ? 0 : -1 },
                element('td', { class: 'box' }, box), ...texts.map(([text, kind]) => element('td', { text, class: kind }))));
        }
        this.body.replaceChildren(gap(first * ROW), ...lines, gap((count - last) * ROW));
        if (focused) this.body.querySelector(`[data-index="${this.at}"]`)?.focus({ preventScroll: true });
        this.inView = rows.id.slice(first, last);
        this.ask(this.inView, 400);
    }

    onKey(event) {
        const { id } = this.data.rows, steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -id.length, End: id.length };
        if (event.key === ' ') this.tick(id[this.at]);
        else if (event.key === 'Enter') this.tell('open', id[this.at]);
        else if (event.key in steps) {
            this.at = Math.max(0, Math.min(id.length - 1, this.at + steps[event.key]));
            const top = this.at * ROW, { scrollTop, clientHeight } = this.scroll;
            if (top < scrollTop) this.scroll.scrollTop = top;
            if (top + 2 * ROW > scrollTop + clientHeight - ROW) this.scroll.scrollTop = top + 3 * ROW - clientHeight;
            this.drawRows();
            this.body.querySelector(`[data-index="${this.at}"]`)?.focus({ preventScroll: true });
        } else return;
        event.preventDefault();
    }

    tick(id) {
        if (this.ticked.includes(id)) this.ticked = this.ticked.filter(other => other !== id);
        else if (this.ticked.length < this.data.most) this.ticked = [...this.ticked, id];
        else { this.full = true; this.drawTicks(); return; }
        this.full = false;
        this.changed();
    }

    changed() {
        this.drawControls();
        this.drawTicks();
        this.draw();
        this.later();
    }

    drawTicks() {
        if (!this.body) return;
        this.drawRows();
        const count = this.ticked.length;
        const button = (text, act, title) => element('button', { type: 'button', class: 'link', text, onclick: act, title });
        this.actions.replaceChildren(...(count ? [
            button(`Clear ${count} ✕`, () => { this.ticked = []; this.full = false; this.changed(); }),
            button('In all runs', () => { this.flush(); this.tell('runs', true); }, 'The same tensors of all runs, one color per run'),
            ...(count === 1 ? [button('Open', () => this.tell('open', this.ticked[0]))] : []),
        ] : []), ...(this.full ? [element('span', { class: 'quiet', role: 'status', text: `At most ${this.data.most}` })] : []));
        if (this.dots) this.markDots();
    }

    // The controls

    drawControls() {
        const { controls } = this.data;
        const ticked = this.ticked.length > 0;
        const drawn = JSON.stringify([controls, this.shown, ticked]);
        if (drawn === this.drawnControls) return;
        this.drawnControls = drawn;
        this.controls.replaceChildren(...controls.map(control => {
            const { name, label, options, list } = control, isGroups = !ticked && this.shown.by !== 'tensor';
            const disabled = name === 'by' ? ticked : name === 'rounded' && isGroups;
            const why = name === 'by' ? 'Each ticked tensor is drawn. Clear the ticks to compare groups' : 'Tensors are rounded: tick some, or compare by tensor';
            const help = disabled ? why : control.help;
            const value = this.shown[name] ?? control.value;
            if (list) {
                const select = element('select', { disabled, title: help, name, onchange: () => this.tell('set', [name, select.value]) },
                    ...options.map(([key, text]) => element('option', { value: key, text, selected: key === value })));
                return element('label', {}, element('span', { text: label }), select);
            }
            return element('div', { class: 'segments', role: 'group', 'aria-label': label, title: help }, ...options.map(([key, text]) => element('button', {
                type: 'button', text, 'aria-pressed': String(key === value), onclick: () => {
                    if (this.shown[name] === key) return;
                    this.shown[name] = key;
                    this.drawControls();
                    this.changed();
                } })));
        }));
    }

    // The charts

    // What to draw now: what Python computed for these ticks, or what can be made of the curves at hand; null if neither.
    groups() {
        const { drawn, rows, first, palette, steps, laws, law } = this.data;
        const { values, axis, by, rounded } = this.shown;
        if (drawn && same(drawn.ids, this.ticked) && same(drawn.shown, this.shown) && drawn.law === law) return drawn;
        const ids = this.ticked.length ? this.ticked : by === 'tensor' ? rows.id.slice(0, first) : null;
        if (!ids || rounded !== 'no' || axis !== 'log2' || !(values in { raw: 0, sigma: 0 }) || !(law in laws)) return null;
        if (!this.ask(ids, 0)) return null;
        const groups = ids.map((id, index) => {
            const curve = this.curves[id], at = this.order.get(id);
            const name = at === undefined ? id : rows.name[at] + (rows.of[at] ? ` · ${rows.of[at]}` : '');
            return { ...curve, ...curve.bins[values], name, color: palette[index % palette.length], dash: [1, 0] };
        });
        const below = Math.max(...groups.map(group => edgeOf(steps, group.first + group.shares.length))) - 32;
        return { groups, below, caption: drawn?.caption, axis: values === 'raw' ? '|value|' : '|value| / σ of its tensor', against: laws[law] };
    }

    // Ask for the curves of these tensors that are not here. Returns whether all are.
    ask(ids, pause) {
        if (!(this.data.law in this.data.laws)) return false;
        const missing = ids.filter(id => !(id in this.curves));
        if (!missing.length) return true;
        const wanted = missing.filter(id => !this.asked.has(id)).slice(0, this.data.piece);
        if (wanted.length) {
            clearTimeout(this.asking);
            this.asking = setTimeout(() => { wanted.forEach(id => this.asked.add(id)); this.tell('needs', wanted); }, pause);
        }
        return false;
    }

    draw() {
        if (this.data.panels || !this.order) return;
        const { legend, places, said } = this;
        const drawn = this.groups();
        this.root.classList.toggle('waiting', !drawn);
        if (!drawn) {
            if (this.timer) this.flush(); // Python has to compute it
            return;
        }
        const { groups, against } = drawn;
        legend.replaceChildren(...groups.map(({ name, color, dash }) => this.entry(name, color, dash)));
        const linear = this.shown.axis === 'linear';
        const line = { group: [], low: [], share: [], color: [], dash: [] }, point = { group: [], theoretical: [], sample: [], share: [], color: [], dash: [] };
        for (const { name, color, dash, first, low, step, shares, x, y, below } of groups) {
            const place = linear ? index => low + index * step : index => edgeOf(this.data.steps, first + index);
            for (let index = 0; index <= shares.length && shares.length; index += 1) {
                if (!linear && place(index) < drawn.below) continue;
                for (const [key, value] of [['group', name], ['low', place(index)], ['share', shares[index] ?? 0], ['color', color], ['dash', dash]]) line[key].push(value);
            }
            for (let index = 0; index < x.length; index += 1) {
                if (Math.abs(y[index]) > 12) continue;
                for (const [key, value] of [['group', name], ['theoretical', x[index]], ['sample', y[index]], ['share', below[index]], ['color', color], ['dash', dash]]) point[key].push(value);
            }
        }
        places.histogram.title.textContent = linear ? 'Distribution of values' : 'Distribution of magnitudes';
        places.histogram.axis.textContent = drawn.axis;
        places.qq.title.textContent = `Q–Q against ${against}`;
        places.qq.axis.textContent = 'standardized; zeros left out';
        places.qq.counts.replaceChildren(...groups.filter(({ beyond: [above, below] }) => above || below).slice(0, 4).map(({ beyond, color }) =>
            element('span', { style: `color:${color}`, text: beyond.map((count, end) => count ? `${'▲▼'[end]} ${count.toLocaleString('en')} ` : '').join('') + 'beyond 12' })));
        const tails = kind => groups.filter(group => group.tails === kind).map(group => group.name);
        const parts = ['heavier', 'lighter'].map(kind => [kind, tails(kind)]).filter(([, names]) => names.length)
            .map(([kind, names]) => `${kind}: ${names.slice(0, 2).join(', ')}${names.length > 2 ? ` and ${names.length - 2} more` : ''}`);
        said.textContent = parts.length ? `Tails against ${against}: ${parts.join('; ')}.` : '';
        const names = groups.map(group => group.name).join(', ');
        this.show(places.histogram, linear ? 'linear' : 'log2', { d0: table(line) }, 255, `${places.histogram.title.textContent} of ${names}`, drawn.caption);
        this.show(places.qq, 'qq', { ...this.data.plots.qq.tables, d1: table(point) }, 255, `Q–Q plot of ${names} against ${against}`, drawn.caption);
    }

    // Of tensors the legend names the lines; a group is a button that keeps it alone.
    entry(name, color, dash) {
        const ends = dash.map((_, index) => dash.slice(0, index + 1).reduce((a, b) => a + b));
        const stops = ends.map((end, index) => `${index % 2 ? 'transparent' : color} ${end - dash[index]}px ${end}px`);
        const line = element('i', { style: `background:repeating-linear-gradient(90deg, ${stops})` });
        const inside = [line, name], { by } = this.shown;
        if (this.ticked.length || by === 'tensor') return element('span', { role: 'listitem' }, ...inside);
        const only = element('button', { type: 'button', class: 'link', title: 'Filter to this', onclick: () => this.tell('set', ['only', name]) }, ...inside);
        return element('span', { role: 'listitem' }, only);
    }

    show(place, plot, tables, height, alt, caption, hear = () => {}) {
        const { spec, selections } = this.data.plots[plot];
        const marked = selections.length ? this.data.within : null; // without the range that was dragged over before
        place.plot.show({ spec, tables, height, alt, selections, marked }, hear);
        exportMenu(place.chart, {
            table: false, chart: place.name, caption: caption ?? { svg: '', width: 0, height: 0 }, name: `binade-${place.name}`,
            pin: this.data.pin, saved: this.data.saved, gestures: plot === 'formats' ? ['Click: tick this', 'Drag: keep the operands in a range'] : [],
        }, (name, value) => { if (this.timer) this.flush(); this.tell(name, value); });
    }

    drawFormats() {
        const { formats, without } = this.data, place = this.places.formats;
        place.box.hidden = !formats;
        this.formatNote.textContent = formats ? formats.notes : without ?? '';
        if (!formats) return;
        this.dots = formats.tables.d2;
        place.title.replaceChildren(formats.title, element('small', {}, element('i', { class: 'forward' }), 'forward', element('i', { class: 'backward' }), 'backward'));
        this.markDots();
    }

    // The dots stay; those of ticked tensors are drawn again, larger.
    markDots() {
        const { formats } = this.data, ticked = new Set(this.ticked), { columns } = this.dots;
        const marked = columns.tensor.flatMap((id, index) => (ticked.has(id) ? [index] : []));
        if (this.places.formats.plot.shown && this.markedOf === formats && same(marked, this.marked)) return;
        Object.assign(this, { marked, markedOf: formats });
        const larger = Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, marked.map(index => values[index])]));
        const tables = { ...formats.tables, d1: { columns: larger, length: marked.length } };
        this.show(this.places.formats, 'formats', tables, formats.height, formats.title, formats.caption, (name, selected) => {
            if (name === 'chosen') this.tick(selected[0].tensor);
            else if (name === 'dragged') this.tell('set', ['delta', Object.values(selected)[0]]);
        });
    }

    drawPanels(panels) {
        if (same(panels, this.drawnPanels)) return;
        this.drawnPanels = panels;
        this.panels.replaceChildren(...panels.map(panel => {
            const place = this.place(panel.name);
            place.plot.show({ ...panel, alt: panel.title, selections: [], marked: null });
            exportMenu(place.chart, { table: false, chart: panel.name, caption: panel.caption, name: `binade-${panel.name}`, pin: this.data.pin,
                saved: this.data.saved, gestures: [] }, (name, value) => this.tell(name, value));
            return place.box;
        }));
    }

    leave() {
        clearTimeout(this.asking);
        Object.values(this.places).forEach(place => place.plot.leave());
    }
}

export default function (component, scripts) {
    const root = component.parentElement.querySelector('.explore');
    root.dataset.state = 'drawn';
    root.page ??= new Explore(root, scripts);
    root.page.receive(component);
    return () => root.page.leave();
}
