// Streamlit opens another page in steps: it pushes the new parameters on the page that is left, then the new page.
// `address.go` marks the first address with the page; all up to the last replace it, so that Back meets none between.
// An address also replaces one that shows the same: one that differs only in what the view leaves open, which
// `address.RESOLVED` names, or, after a reload, only in whether it names that.
// one_address.py adds this to the document, since the first address is written before the page runs a script.
if (!history.pushes) {
    history.pushes = history.pushState;
    let target = null;
    const without = (url, names) => {
        const query = new URLSearchParams(url.search);
        for (const name of names) query.delete(name);
        query.sort();
        return `${url.pathname}?${query}`;
    };
    const leftOpen = url => (new URLSearchParams(url.search).get('resolved') || '').split(',');
    const chosen = url => without(url, ['resolved', ...leftOpen(url)]);
    const all = url => without(url, ['resolved']);
    history.pushState = (...entry) => {
        const next = new URL(entry[2] ?? '', location.href);
        const same = chosen(next) === chosen(location) || all(next) === all(location);
        (target || same ? history.replaceState : history.pushes).apply(history, entry);
        const to = new URLSearchParams(location.search).get('to');
        if (to || (location.pathname.split('/').pop() || 'map') === target) target = to;
    };
}
