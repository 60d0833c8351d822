// The Map: what stands out, heat maps of a metric by operand and layer, beside them the exceptions or the panel of the
// selected cell, and the iterations. Python sends `data` (see page._data and panel.panel) and hears of `selected`,
// `iteration`, `across`, `open`, `pin`, `compare`, `explore` and `advise`.
const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
        if (key === 'text') made.textContent = value;
        else if (key.startsWith('on')) made[key] = value;
        else if (value !== undefined && value !== null) made.setAttribute(key, value);
    }
    made.append(...children.filter(Boolean));
    return made;
};
const drawing = (name, attributes = {}, text) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
};
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

// shade: 0 (no loss) to 1; of a difference -1 (better) to 1 (worse).
function color(shade, difference) {
    if (difference) {
        const part = Math.round(100 * Math.abs(shade));
        return `color-mix(in srgb, var(${shade < 0 ? '--better' : '--worse'}) ${part}%, var(--c0))`;
    }
    const at = 5 * clamp(shade, 0, 1), low = Math.min(4, Math.floor(at));
    return `color-mix(in srgb, var(--c${low + 1}) ${Math.round(100 * (at - low))}%, var(--c${low}))`;
}

// From the lowest value to the highest.
function swatch({ bad_is_low, difference }) {
    const steps = [...Array(13).keys()].map(at => {
        const part = difference ? at / 6 - 1 : at / 12;
        return `${color(bad_is_low ? (difference ? 0 : 1) - part : part, difference)} ${100 * at / 13}% ${100 * (at + 1) / 13}%`;
    });
    return `linear-gradient(90deg, ${steps.join(', ')})`;
}

function isDark(node) {
    const found = getComputedStyle(node).getPropertyValue('--st-background-color').trim()
        || getComputedStyle(document.body).backgroundColor;
    const probe = document.createElement('canvas').getContext('2d');
    probe.fillStyle = found;
    const hex = probe.fillStyle;
    if (!hex.startsWith('#')) return false;
    const [r, g, b] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
    return 0.3 * r + 0.59 * g + 0.11 * b < 128;
}

export default function (component) {
    const { data, parentElement, setStateValue, setTriggerValue } = component;
    const root = parentElement.querySelector('.map');
    const state = root.state ??= { selected: null, drawn: '', timer: 0, playing: 0 };
    state.act = { setStateValue, setTriggerValue };
    state.data = data;
    root.classList.toggle('dark', isDark(root));
    const { panel, selected, ...map } = data;
    const drawn = JSON.stringify(map);
    if (drawn !== state.drawn) {
        state.drawn = drawn;
        drawMap(root, state);
    }
    if (!state.timer) select(root, state, selected);
    drawPanel(root, state);
    state.watch ??= new ResizeObserver(() => root.classList.toggle('narrow', root.clientWidth < 900));
    state.watch.observe(root);
    if (state.playing) state.playing = setTimeout(() => step(root, state), 500);
    return () => state.watch.disconnect();
}

function drawMap(root, state) {
    const { data } = state;
    const tip = element('div', { class: 'tip', role: 'status' });
    state.tip = tip;
    const focused = root.getRootNode().activeElement?.dataset.id; // a cell, which is drawn again
    state.cells = new Map();
    state.order = [];
    const many = data.columns.length > 60 ? ' many' : '';
    const blocks = data.blocks.map(block => drawBlock(state, block));
    const exceptions = element('aside', { class: 'exceptions', 'aria-label': 'Exceptions' });
    const panel = element('aside', { class: 'panel', 'aria-label': 'The chosen cell', 'aria-live': 'polite' });
    const grid = element('div', { class: `grid blocks${many}`, role: 'group',
        'aria-label': `${data.metric} by ${data.of} and ${data.word}` }, ...blocks, exceptions);
    grid.onkeydown = event => onKey(root, state, event);
    const link = (text, id) => id ? element('button', { type: 'button', class: 'link', text, onclick: () => choose(root, state, id, 0) })
        : document.createTextNode(text);
    const said = element('h3', { class: 'said' }, ...data.headline.map(([text, id]) => link(text, id)));
    const toggle = element('div', { class: 'across', role: 'group', 'aria-label': 'Columns' },
        ...[['layer_index', 'layers'], ['iteration', 'iterations']].map(([name, text]) => element('button', { type: 'button', text,
            'aria-pressed': name === data.across, onclick: () => state.act.setTriggerValue('across', name) })));
    const legend = element('div', { class: 'legend', title: data.definition }, element('b', { text: data.metric }),
        element('span', { text: data.scope }), element('span', { text: data.legend.low }),
        element('i', { style: `background:${swatch(data.legend)}` }), element('span', { text: data.legend.high }));
    root.replaceChildren(said, element('div', { class: 'tools' }, legend, toggle),
        element('div', { class: 'beside' }, grid, panel), drawTime(root, state), tip);
    drawExceptions(root, state, exceptions);
    (state.cells.get(focused) ?? state.cells.values().next().value)?.made.setAttribute('tabindex', 0);
    state.cells.get(focused)?.made.focus();
    root.onpointermove = event => onHover(state, event);
    root.onpointerleave = () => { tip.style.display = 'none'; };
    root.onclick = event => {
        tip.style.display = 'none'; // the panel moves the cells
        const cell = event.composedPath()[0].closest?.('.cell');
        if (cell?.dataset.id) choose(root, state, cell.dataset.id === state.selected ? null : cell.dataset.id, 0);
    };
}

// The longest texts of the rows of all blocks, which give the names of each block the same widths.
function longest(blocks, name) {
    return blocks.flatMap(block => block.rows).map(row => row[name]).reduce((a, b) => (b.length > a.length ? b : a), '');
}

function drawBlock(state, block) {
    const { data } = state;
    const rows = element('div', { class: 'rows', role: 'grid', 'aria-label': block.title },
        ...['group', 'name'].map(name => element('div', { class: `${name} sizer`, 'aria-hidden': 'true', text: longest(data.blocks, name) })),
        element('div', { class: 'sizer', 'aria-hidden': 'true' }));
    let group = null;
    for (const row of block.rows) {
        const first = row.group !== group;
        group = row.group;
        const named = `${row.group} ${row.name}, ${block.title}`;
        const cells = element('div', { class: `cells${first ? ' first' : ''}`, role: 'row', 'aria-label': named });
        row.cells.forEach((cell, index) => {
            const id = `${row.id}/${data.columns[index]}`;
            const none = !cell || cell[0] === null;
            const made = element('div', { class: `cell${none ? ' none' : ''}`, role: 'gridcell',
                'aria-label': `${named}, ${data.word} ${data.columns[index]}: ${cell ? cell[1] : 'not recorded'}` });
            if (cell) {
                made.dataset.id = id;
                made.tabIndex = -1;
                if (!none) made.style.background = color(cell[0], data.legend.difference);
                state.cells.set(id, { made, cell, row, block, column: data.columns[index] });
            }
            cells.append(made);
        });
        state.order.push({ row, block });
        rows.append(element('div', { class: `group${first ? ' first' : ''}`, text: first ? row.group : '', 'aria-hidden': 'true' }),
            element('div', { class: `name${first ? ' first' : ''}`, text: row.name, 'aria-hidden': 'true' }), cells);
    }
    const axis = element('div', { class: 'axis', 'aria-hidden': 'true' });
    const count = data.columns.length, stride = count <= 8 ? 1 : Math.ceil(count / 6);
    data.columns.forEach((column, index) => {
        if (index % stride && index !== count - 1) return;
        if (index !== count - 1 && count - 1 - index < stride / 2) return;
        axis.append(element('span', { text: column, style: `left:${100 * (index + 0.5) / count}%` }));
    });
    rows.append(axis);
    return element('section', {}, element('h4', { text: block.title }), rows);
}

function drawTime(root, state) {
    const { values, current, losses, events } = state.data.iterations;
    if (values.length < 2 && losses.length < 2) return element('div');
    const ends = [...values, ...losses.map(each => each[0])];
    const first = Math.min(...ends), last = Math.max(...ends), span = last - first || 1;
    const chart = drawing('svg', { viewBox: '0 0 1000 46', preserveAspectRatio: 'none', 'aria-hidden': 'true' });
    if (losses.length > 1) {
        const low = Math.min(...losses.map(each => each[1])), high = Math.max(...losses.map(each => each[1]));
        const points = losses.map(([at, loss]) => `${1000 * (at - first) / span},${40 - 34 * (loss - low) / (high - low || 1)}`);
        chart.append(drawing('polyline', { points: points.join(' '), fill: 'none', stroke: 'currentColor', opacity: 0.5,
            'vector-effect': 'non-scaling-stroke' }));
    }
    for (const at of values) chart.append(drawing('line', { x1: 1000 * (at - first) / span, x2: 1000 * (at - first) / span,
        y1: 42, y2: 46, stroke: 'currentColor', 'vector-effect': 'non-scaling-stroke' }));
    for (const [at] of events) chart.append(drawing('line', { x1: 1000 * (at - first) / span, x2: 1000 * (at - first) / span,
        y1: 0, y2: 46, stroke: 'var(--c3)', 'stroke-dasharray': '3 3', 'vector-effect': 'non-scaling-stroke' }));
    const index = Math.max(0, values.indexOf(current));
    const output = element('output', { text: current ?? 'all' });
    const slider = element('input', { type: 'range', min: 0, max: values.length - 1, value: index, 'aria-label': 'iteration',
        'aria-valuetext': `iteration ${current ?? 'all'}`, ...(values.length < 2 || current === null ? { disabled: '' } : {}) });
    slider.oninput = () => { output.textContent = values[slider.value]; };
    slider.onchange = () => state.act.setTriggerValue('iteration', values[slider.value]);
    state.slider = slider;
    const play = element('button', { type: 'button', text: state.playing ? 'Pause' : 'Play',
        ...(values.length < 2 || current === null ? { disabled: '' } : {}) });
    play.onclick = () => {
        if (state.playing) { clearTimeout(state.playing); state.playing = 0; play.textContent = 'Play'; return; }
        play.textContent = 'Pause';
        if (+slider.value === values.length - 1) slider.value = -1;
        state.from = +slider.value === 0 && index === values.length - 1 ? -1 : +slider.value;
        step(root, state);
    };
    const words = losses.length ? `loss ${losses[0][1].toPrecision(4)} → ${losses.at(-1)[1].toPrecision(4)}` : '';
    const said = events.slice(0, 3).map(([at, text]) => `iteration ${at}: ${text}`).join(' · ');
    return element('div', { class: 'time' },
        element('h4', { text: `iteration${words ? ' · ' : ''}${words}` }), losses.length > 1 || events.length ? chart : null,
        element('div', { class: 'controls' }, play, slider, output), said ? element('div', { class: 'keys', text: said }) : null);
}

function step(root, state) {
    const { values, current } = state.data.iterations;
    const at = state.from !== undefined && state.from < 0 ? 0 : values.indexOf(current) + 1;
    state.from = undefined;
    if (at >= values.length) { state.playing = 0; state.drawn = ''; drawMap(root, state); select(root, state, state.selected); drawPanel(root, state); return; }
    state.playing = 1;
    state.act.setTriggerValue('iteration', values[at]);
}

function onHover(state, event) {
    const target = event.composedPath()[0];
    const cell = target.closest?.('.cell');
    const { tip, data } = state;
    const known = cell && state.cells.get(cell.dataset.id);
    if (!known) { tip.style.display = 'none'; return; }
    const { row, block, column, cell: [, label, between, , several] } = known;
    const lines = [`${row.group} ${row.name} · ${block.title}`, `${data.word} ${column}`, label];
    if (between) lines.push(between);
    if (several) lines.push(several);
    tip.innerText = lines.join('\n');
    tip.style.display = 'block';
    const { clientWidth, clientHeight } = document.documentElement;
    tip.style.left = `${Math.min(event.clientX + 14, clientWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, clientHeight - tip.offsetHeight - 8)}px`;
}

function select(root, state, id) {
    state.cells.get(state.selected)?.made.classList.remove('on');
    state.cells.get(state.selected)?.made.removeAttribute('aria-selected');
    state.selected = id;
    const made = state.cells.get(id)?.made;
    if (!made) return;
    made.classList.add('on');
    made.setAttribute('aria-selected', 'true');
    root.querySelectorAll('.cell[tabindex="0"]').forEach(cell => cell.setAttribute('tabindex', -1));
    made.setAttribute('tabindex', 0);
}

// The outline moves at once; Python hears of it after the last of several moves.
function choose(root, state, id, wait = 140) {
    if (id !== null && !state.cells.has(id)) return;
    select(root, state, id);
    if (id !== null && root.getRootNode().activeElement?.dataset.id) state.cells.get(id).made.focus();
    clearTimeout(state.timer);
    state.timer = setTimeout(() => { state.timer = 0; state.act.setStateValue('selected', id); }, wait);
}

function onKey(root, state, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { key } = event;
    const listed = state.data.exceptions.map(each => each.id);
    const keys = ['ArrowLeft', 'ArrowRight', 'ArrowUp', 'ArrowDown', 'Enter', 'Escape', '[', ']'];
    if (!keys.includes(key) || event.target.closest('button')) return;
    event.preventDefault();
    event.stopPropagation();
    if (key === 'Escape') { choose(root, state, null, 0); return; }
    if (key === '[' || key === ']') {
        const at = listed.indexOf(state.selected) + (key === ']' ? 1 : -1);
        if (listed[at]) choose(root, state, listed[at]);
        return;
    }
    const known = state.cells.get(state.selected);
    if (!known) { choose(root, state, listed[0] ?? [...state.cells.keys()][0]); return; }
    if (key === 'Enter') { state.act.setTriggerValue('open', state.selected); return; }
    const { columns } = state.data;
    let column = columns.indexOf(known.column);
    let place = state.order.findIndex(each => each.row === known.row);
    const [across, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
    for (;;) {
        column += across;
        place += down;
        if (column < 0 || column >= columns.length || place < 0 || place >= state.order.length) return;
        const id = `${state.order[place].row.id}/${columns[column]}`;
        if (state.cells.has(id)) { choose(root, state, id); return; }
    }
}

const KEYS = 'Keys: ← → layer · ↑ ↓ row · Enter open · [ ] exceptions · Esc close';

function drawExceptions(root, state, place) {
    const { exceptions, count, words, pin } = state.data;
    const list = element('div', { class: 'list' });
    for (const each of exceptions) {
        list.append(element('span', {}, element('button', { type: 'button', class: 'link', text: each.name, onclick: () => choose(root, state, each.id, 0) }),
            element('small', { text: each.gemm ? ` ${each.gemm}` : '' })),
            element('span', { text: each.value }), element('span', { class: 'delta', text: each.delta }), element('span', { class: 'cause', text: each.cause }));
    }
    const act = (name, text, value, main) => element('button', { type: 'button', class: main ? 'main' : '', text,
        onclick: () => state.act.setTriggerValue(name, value) });
    const first = exceptions[0], below = first?.delta;
    place.replaceChildren(...[
        element('h4', { text: words }), list,
        element('div', { class: 'acts' }, first ? act('open', `Open ${first.name}`, first.id, true) : null,
            below ? act('explore', `Show all ${count.toLocaleString('en')} in Explore`, true) : null, act('advise', 'What should I use?', true, !first), pin ? act('pin', 'Pin', true) : null),
        element('div', { class: 'keys', text: `Click a cell for its panel: values over the grid, other formats. ${KEYS}` }),
    ]);
}

function drawPanel(root, state) {
    const place = root.querySelector('.panel'), { panel, pin } = state.data;
    root.classList.toggle('open', Boolean(panel));
    if (!panel) { place.replaceChildren(); return; }
    const facts = element('div', { class: 'facts' }, ...panel.facts.map(([name, text]) =>
        element('div', {}, element('span', { text: name }), element('strong', { text }))));
    const most = Math.max(1e-9, ...panel.formats.map(each => each.value ?? 0));
    const formats = element('div', { class: 'formats' });
    for (const each of panel.formats) {
        const width = each.value === null ? 100 : clamp(100 * each.value / most, 0, 100);
        formats.append(element('div', { class: `name${each.own ? ' own' : ''}`, text: each.name, title: each.name }),
            element('i', { class: each.own ? 'own' : '', style: `width:${width}%` }), element('span', { text: `${each.text} · ${each.bits}` }));
    }
    const act = (name, label, main) => element('button', { type: 'button', class: main ? 'main' : '', text: label,
        onclick: () => state.act.setTriggerValue(name, name === 'open' ? state.selected : true) });
    place.replaceChildren(...[
        element('h3', {}, panel.title, element('small', { text: panel.gemm ? ` · ${panel.gemm}` : '' }),
            element('button', { type: 'button', class: 'close', text: '✕', 'aria-label': 'Close', onclick: () => choose(root, state, null, 0) })),
        panel.note ? element('p', { text: panel.note }) : null, facts,
        panel.values ? element('h4', { text: panel.values_note }) : null, panel.values ? drawValues(panel.values) : null,
        panel.formats.length ? element('h4', { text: 'The same operand in other formats' }) : null, formats,
        panel.formats.length && panel.formats_note ? element('div', { class: 'keys', text: panel.formats_note }) : null,
        element('div', { class: 'acts' }, act('open', 'Open tensor', true), pin ? act('pin', 'Pin') : null, act('compare', 'Compare runs')),
    ].filter(Boolean));
}

function drawValues(values) {
    const [width, height] = [360, 130], { low, high, bars } = values;
    const x = at => 4 + (width - 8) * (at - low) / (high - low);
    const chart = drawing('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img',
        'aria-label': 'Histogram of the values over the format’s grid' });
    const flushed = clamp(x(values.flushed_below), 0, width), saturated = clamp(x(values.saturated_above), 0, width);
    const zone = (from, to) => chart.append(drawing('rect', { x: from, y: 18, width: Math.max(0, to - from), height: height - 36, fill: 'var(--c3)', opacity: 0.13 }));
    zone(0, flushed);
    zone(saturated, width);
    const most = Math.max(...bars.map(([, , share]) => share)) || 1;
    const [flush, clip] = [values.flushed_below, values.saturated_above];
    for (const [first, last, share] of bars) { // a bar that an edge of the grid crosses has two parts
        const ends = [first, ...[flush, clip].filter(at => first < at && at < last), last], tall = (height - 40) * share / most;
        ends.slice(1).forEach((to, index) => {
            const lost = to <= flush || ends[index] >= clip;
            chart.append(drawing('rect', { x: x(ends[index]), y: height - 18 - tall, width: Math.max(0.5, x(to) - x(ends[index]) - 0.4), height: tall,
                fill: lost ? 'var(--c3)' : 'currentColor', opacity: lost ? 1 : 0.75 }));
        });
    }
    chart.append(drawing('text', { x: 2, y: 12 }, 'flushed to zero'),
        drawing('text', { x: width - 2, y: 12, 'text-anchor': 'end' }, 'saturated'));
    for (const [at, text] of values.ticks) chart.append(drawing('text', { x: clamp(x(at), 12, width - 12), y: height - 4, 'text-anchor': 'middle' }, text));
    const box = element('div', { class: 'values' });
    box.append(chart, element('div', { class: 'keys', text: `share of ${values.sample} by log₂ of |x| over its scale; shaded: outside the grid${values.left}` }));
    return box;
}
