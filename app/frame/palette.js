// The palette: Ctrl K opens a search box, `?` the list of keys. Python answers `text` with entries, and hears of `chosen`
// and `pressed`.
export default function ({ data, parentElement, setStateValue, setTriggerValue }) {
    const root = parentElement.querySelector('.palette');
    const state = root.state ??= { at: 0, timer: 0 };
    Object.assign(state, { data, setStateValue, setTriggerValue });
    if (!state.box) build(root, state);
    list(state);
    if (!state.bound) {
        state.bound = event => onKey(state, event);
        document.addEventListener('keydown', state.bound);
    }
    return () => {
        document.removeEventListener('keydown', state.bound);
        state.bound = null;
    };
}

function build(root, state) {
    root.innerHTML = `<button class="open" type="button" aria-keyshortcuts="Control+K"><span>Search tensors, runs, questions</span><kbd>Ctrl K</kbd></button>
        <dialog class="search" aria-label="Search"><input type="text" role="combobox" aria-expanded="true" aria-controls="found" aria-label="Search tensors, runs, formats, pages and questions"
            placeholder="fc2 grad L18, mxfp4, recipes …" autocomplete="off" spellcheck="false"><ul role="listbox" id="found" aria-label="Found"></ul></dialog>
        <dialog class="keys" aria-label="Keys"><dl></dl></dialog>`;
    state.box = root.querySelector('.search');
    state.keys = root.querySelector('.keys');
    state.input = root.querySelector('input');
    state.list = root.querySelector('ul');
    root.querySelector('.open').onclick = () => open(state);
    for (const dialog of [state.box, state.keys]) dialog.onclick = event => { if (event.target === dialog) dialog.close(); };
    state.input.oninput = () => {
        state.waits = false;
        clearTimeout(state.timer);
        state.timer = setTimeout(() => state.setStateValue('text', state.input.value), 120);
    };
    state.input.onkeydown = event => {
        const moves = { ArrowDown: 1, ArrowUp: -1 };
        if (event.key in moves) {
            event.preventDefault();
            state.at = Math.max(0, Math.min(state.list.children.length - 1, state.at + moves[event.key]));
            mark(state);
        } else if (event.key === 'Enter') {
            event.preventDefault();
            choose(state, state.at);
        }
    };
    const keys = state.keys.querySelector('dl');
    for (const [key, text] of state.data.keys) {
        const [term, what] = [document.createElement('dt'), document.createElement('dd')];
        term.textContent = key;
        what.textContent = text;
        keys.append(term, what);
    }
}

function open(state) {
    state.input.value = '';
    state.at = 0;
    state.waits = false;
    if (state.data.text) state.setStateValue('text', '');
    state.box.showModal();
    state.input.focus();
}

function list(state) {
    const { entries, text } = state.data;
    state.at = 0;
    state.list.replaceChildren(...entries.map(([kind, title, detail], index) => {
        const item = document.createElement('li');
        item.setAttribute('role', 'option');
        item.id = `found-${index}`;
        for (const [name, value] of [['kind', kind], ['title', title]]) {
            const part = document.createElement('span');
            part.className = name;
            part.textContent = value;
            item.append(part);
        }
        const more = document.createElement('small');
        more.textContent = detail;
        item.lastChild.append(more);
        item.onclick = () => choose(state, index);
        item.onpointermove = () => { state.at = index; mark(state); };
        return item;
    }));
    if (!entries.length) {
        const none = document.createElement('p');
        none.textContent = `Nothing matches all words of “${text}”.`;
        state.list.append(none);
    }
    mark(state);
    if (state.waits && state.box.open) choose(state, 0);
}

function mark(state) {
    [...state.list.children].forEach((item, index) => item.setAttribute('aria-selected', index === state.at));
    state.list.children[state.at]?.scrollIntoView({ block: 'nearest' });
    state.input.setAttribute('aria-activedescendant', `found-${state.at}`);
}

// What is typed may not have been answered yet: then Python searches first, and the first of what it finds is chosen.
function choose(state, index) {
    const { text, entries } = state.data;
    state.waits = state.input.value !== text;
    if (state.waits || !entries.length) return;
    state.box.close();
    state.setTriggerValue('chosen', { text, index });
}

function onKey(state, event) {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === 'k') {
        event.preventDefault();
        if (state.box.open) state.box.close(); else open(state);
        return;
    }
    const target = event.composedPath()[0];
    const typing = target.closest?.('input, textarea, select, [contenteditable], [role=combobox], [role=listbox], canvas');
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === 'z' && (!typing || target.tagName === 'CANVAS')) {
        event.preventDefault();
        if (event.shiftKey) history.forward(); else history.back();
        return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || typing || state.box.open || event.defaultPrevented) return;
    if (event.key === '?') { state.keys.showModal(); return; }
    if ('jk[]fp'.includes(event.key) && event.key.length === 1) state.setTriggerValue('pressed', event.key);
}
