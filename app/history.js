// Streamlit opens another page in steps: it pushes the new parameters on the page that is left, then the new page.
// `address.go` marks the first address with the page; all up to the last replace it, so that Back meets none between.
// An address also replaces one that differs only in what the view leaves open: `address.RESOLVED` names it.
if (!history.pushes) {
    history.pushes = history.pushState;
    let target = null;
    const chosen = url => {
        const query = new URLSearchParams(url.search);
        for (const name of (query.get('resolved') || '').split(',')) query.delete(name);
        query.delete('resolved');
        query.sort();
        return `${url.pathname}?${query}`;
    };
    history.pushState = (...entry) => {
        const same = chosen(new URL(entry[2] ?? '', location.href)) === chosen(location);
        (target || same ? history.replaceState : history.pushes).apply(history, entry);
        const to = new URLSearchParams(location.search).get('to');
        if (to || (location.pathname.split('/').pop() || 'map') === target) target = to;
    };
}
