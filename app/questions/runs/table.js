// The table of runs: workloads, their recipes over seeds, and, of an open group, its runs. Python sends `data` (see
// table.data_of) and hears of `picked`, {chosen, hidden, columns, sort}, and of `go`, a link that was followed. Keys: up
// and down move, right and left open and close a group, space chooses, h hides, / searches.
const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
        if (key === 'text') made.textContent = value;
        else if (key.startsWith('on') || key === 'checked' || key === 'indeterminate') made[key] = value;
        else if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value);
    }
    made.append(...children.filter(Boolean));
    return made;
};

function isDark(node) {
    const probe = document.createElement('canvas').getContext('2d');
    probe.fillStyle = getComputedStyle(node).getPropertyValue('--st-background-color').trim() || '#ffffff';
    if (!probe.fillStyle.startsWith('#')) return false;
    const [r, g, b] = [1, 3, 5].map(at => parseInt(probe.fillStyle.slice(at, at + 2), 16));
    return 0.3 * r + 0.59 * g + 0.11 * b < 128;
}

function spark(points, color) {
    const made = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
    const known = points.filter(point => point !== null);
    if (known.length < 2) return made;
    const low = Math.min(...known), span = Math.max(...known) - low || 1;
    const line = document.createElementNS('http://www.w3.org/2000/svg', 'polyline');
    const at = points.map((point, index) => point === null ? null
        : `${(110 * index / (points.length - 1)).toFixed(1)},${(18 - 16 * (point - low) / span).toFixed(1)}`);
    line.setAttribute('points', at.filter(Boolean).join(' '));
    line.setAttribute('style', `fill: none; stroke: ${color}; stroke-width: 1.5`);
    made.append(line);
    return made;
}

export default function (component) {
    const { data, parentElement, setStateValue, setTriggerValue } = component;
    const root = parentElement.querySelector('.runs');
    const groups = data.workloads.flatMap(workload => workload.groups);
    const withChosen = () => groups.filter(group => group.runs.length > 1 && group.runs.some(run => data.picked.chosen.includes(run.id)));
    const state = root.state ??= { open: new Set(withChosen().map(group => group.id)), search: '', focus: null, columnsOpen: false };
    if (state.version !== data.version || !state.picked) state.picked = structuredClone(data.picked);
    state.version = data.version;
    const picked = state.picked;
    root.classList.toggle('dark', isDark(root));

    const tell = () => setStateValue('picked', structuredClone(picked));
    const shown = () => data.columns.filter(column => picked.columns.includes(column.name));
    // A group of one run is its run, too: an address may name either.
    const idsOf = row => row.runs?.length === 1 ? [row.id, row.runs[0].id] : [row.id];
    const isOn = row => idsOf(row).some(id => picked.chosen.includes(id)), isHidden = row => idsOf(row).some(id => picked.hidden.includes(id));
    const without = (list, ids) => list.filter(id => !ids.includes(id));
    const runsOf = group => group.runs.map(run => run.id);

    function choose(row, group) {
        const own = group ? [row.id] : [row.id, ...runsOf(row)];
        if (isOn(row)) picked.chosen = without(picked.chosen, own);
        else picked.chosen = [...without(picked.chosen, own), row.id];
        draw(); tell();
    }
    function hide(row) {
        picked.hidden = [...picked.hidden, row.id];
        picked.chosen = without(picked.chosen, idsOf(row));
        draw(); tell();
    }
    function open(row, is) {
        if (is === undefined ? state.open.has(row.id) : !is) state.open.delete(row.id); else state.open.add(row.id);
        draw();
    }
    const value = (row, name) => row.cells[name]?.[1] ?? row.cells[name]?.[0] ?? null;
    function compare(a, b) {
        if (!picked.sort) return 0;
        const falls = picked.sort.startsWith('-'), name = picked.sort.replace(/^-/, '');
        const [first, second] = [a, b].map(row => name === 'name' ? row.name : value(row, name));
        if (first === null || second === null) return (first === null) - (second === null);
        const order = typeof first === 'number' && typeof second === 'number' ? first - second : String(first).localeCompare(String(second));
        return falls ? -order : order;
    }
    const matches = row => !state.search || row.find.includes(state.search);

    // A link of the page, which the app follows. In another tab, the browser follows its address.
    function anchor(text, link, attributes = {}) {
        const { help, ...to } = link;
        return element('a', { text, href: `?${new URLSearchParams(to)}`, tabindex: -1, title: help, ...attributes, onclick: event => {
            event.stopPropagation();
            if (event.ctrlKey || event.metaKey || event.shiftKey) return;
            event.preventDefault();
            setTriggerValue('go', link);
        } });
    }
    function cell(row, column) {
        const [text, , look, link] = row.cells[column.name] ?? [];
        const made = element('td', { class: `${column.name}${column.number ? ' number' : ''}` });
        if (column.name === 'course' && text) made.append(spark(text, row.color));
        else if (link) made.append(anchor(text, link));
        else made.append(element('span', { class: look, text: text ?? '' , title: typeof text === 'string' && text.length > 20 ? text : null }));
        return made;
    }
    function line(row, group) {
        const on = isOn(row) || (group && isOn(group)) || data.drawn.includes(row.id);
        const box = element('input', { type: 'checkbox', tabindex: -1, checked: isOn(row), title: 'Choose: draw it, and act on it', 'aria-label': `Choose ${row.name}`, onclick: event => { event.stopPropagation(); choose(row, group); } });
        const name = element('td', { class: 'name', title: row.title });
        if (!group && row.runs.length > 1) name.append(element('button', { tabindex: -1, text: state.open.has(row.id) ? '▾' : '▸', title: `${row.runs.length} runs`, 'aria-label': 'Open the group', onclick: event => { event.stopPropagation(); open(row); } }));
        name.append(element('i', { class: on ? '' : 'off', style: `border-color: ${row.color}` }), row.link ? anchor(row.name, row.link) : element('span', { text: row.name }));
        if (row.origin) name.append(element('span', { class: 'icon', text: row.origin[0], title: row.origin[1], 'aria-label': row.origin[1], role: 'img' }));
        const made = element('tr', {
            class: `row ${group ? 'run' : 'group'}${isOn(row) ? ' on' : ''}`, tabindex: state.focus === row.id ? 0 : -1, 'data-id': row.id,
            'aria-level': group ? 3 : 2, 'aria-expanded': !group && row.runs.length > 1 ? String(state.open.has(row.id)) : null, 'aria-selected': String(isOn(row)),
        }, element('td', { class: 'tick' }, box, element('button', { tabindex: -1, text: '⊘', title: 'Hide', 'aria-label': `Hide ${row.name}`, onclick: event => { event.stopPropagation(); hide(row); } })), name);
        for (const column of shown()) made.append(cell(row, column));
        made.ondblclick = () => !group && open(row);
        return made;
    }

    function rows() {
        const body = element('tbody'), ids = [];
        for (const workload of data.workloads) {
            const groups = workload.groups.filter(group => !isHidden(group) && (matches(group) || group.runs.some(matches)));
            if (!groups.length) continue;
            if (data.workloads.length > 1) body.append(element('tr', { class: 'place', 'aria-level': 1 }, element('td', { colspan: shown().length + 2, text: workload.name })));
            for (const group of picked.sort ? [...groups].sort(compare) : groups) {
                body.append(line(group));
                ids.push([group, null]);
                const inside = group.runs.filter(run => !isHidden(run) && (!state.search || matches(run) || matches(group)));
                if (group.runs.length < 2 || !(state.open.has(group.id) || (state.search && !matches(group)))) continue;
                for (const run of picked.sort ? [...inside].sort(compare) : inside) {
                    body.append(line(run, group));
                    ids.push([run, group]);
                }
            }
        }
        return [body, ids];
    }

    function head() {
        const sorted = name => picked.sort === name ? ' ↑' : picked.sort === `-${name}` ? ' ↓' : '';
        const title = (name, text, help, number) => element('th', { class: number ? 'number' : null, scope: 'col', 'aria-sort': sorted(name) ? (sorted(name) === ' ↑' ? 'ascending' : 'descending') : 'none' },
            element('button', { text: text + sorted(name), title: help, onclick: () => {
                picked.sort = picked.sort === name ? `-${name}` : picked.sort === `-${name}` ? '' : name;
                draw(); tell();
            } }));
        return element('thead', {}, element('tr', {}, element('th'), title('name', 'Name', 'A recipe over its seeds; open it for its runs'), ...shown().map(column => title(column.name, column.title, column.help, column.number))));
    }

    function draw() {
        const { scrollTop = 0, scrollLeft = 0 } = root.querySelector('.frame') ?? {}, focused = root.querySelector('tr.row:focus') !== null;
        const searching = root.querySelector('input[type=search]:focus') !== null;
        const [body, ids] = rows();
        if (!ids.some(([row]) => row.id === state.focus)) state.focus = ids[0]?.[0].id ?? null;
        const first = [...body.querySelectorAll('tr.row')].find(row => row.dataset.id === state.focus);
        if (first) first.tabIndex = 0;
        const search = element('input', { type: 'search', placeholder: 'Search runs  /', 'aria-label': 'Search runs', oninput: event => { state.search = event.target.value.toLowerCase(); draw(); } });
        search.value = state.search;
        const columns = element('details', {}, element('summary', { text: 'Columns' }), element('div', {}, ...data.columns.map(column => element('label', {},
            element('input', { type: 'checkbox', checked: picked.columns.includes(column.name), onchange: event => {
                const chosen = event.target.checked ? [...picked.columns, column.name] : without(picked.columns, [column.name]);
                picked.columns = data.columns.map(each => each.name).filter(name => chosen.includes(name));
                draw(); tell();
            } }), column.title))));
        columns.open = state.columnsOpen;
        columns.ontoggle = () => { state.columnsOpen = columns.open; };
        const chosen = picked.chosen.length;
        const table = element('table', { role: 'treegrid', 'aria-label': 'Runs' }, head(), body);
        table.onkeydown = event => keys(event, ids);
        root.replaceChildren(
            element('div', { class: 'tools' }, search, columns,
                chosen ? element('button', { text: `Clear ${chosen} chosen`, onclick: () => { picked.chosen = []; draw(); tell(); } }) : null,
                picked.hidden.length ? element('button', { text: `Show ${picked.hidden.length} hidden`, onclick: () => { picked.hidden = []; draw(); tell(); } }) : null,
                element('span', { class: 'said', text: data.said })),
            element('div', { class: 'frame' }, table, ids.length || !state.search ? null : element('p', { role: 'status', text: `No run has “${state.search}” in its name, state or note.` })));
        Object.assign(root.querySelector('.frame'), { scrollTop, scrollLeft });
        if (focused && first) first.focus({ preventScroll: true });
        if (searching) search.focus();
        root.dataset.state = 'drawn';
    }

    function keys(event, ids) {
        const at = ids.findIndex(([row]) => row.id === event.target.dataset?.id);
        if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
        const [row, group] = ids[at];
        const to = place => {
            state.focus = ids[Math.max(0, Math.min(ids.length - 1, place))][0].id;
            for (const each of root.querySelectorAll('tr.row')) {
                each.tabIndex = each.dataset.id === state.focus ? 0 : -1;
                if (each.tabIndex === 0) each.focus();
            }
        };
        const act = {
            ArrowDown: () => to(at + 1), ArrowUp: () => to(at - 1), Home: () => to(0), End: () => to(ids.length - 1),
            ArrowRight: () => !group && row.runs.length > 1 && open(row, true),
            ArrowLeft: () => group ? to(ids.findIndex(([each]) => each.id === group.id)) : open(row, false),
            ' ': () => choose(row, group), h: () => hide(row), '/': () => root.querySelector('input[type=search]').focus(),
            Enter: () => root.querySelector(`tr[data-id="${CSS.escape(row.id)}"] a`)?.click(),
        }[event.key];
        if (act) { event.preventDefault(); event.stopPropagation(); act(); }
    }
    draw();
}
