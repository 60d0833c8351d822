// Streamlit opens another page in steps: it pushes the new parameters on the page that is left, then the new page.
// `address.go` marks the first address with the page; all up to the last replace it, so that Back meets none between.
if (!history.pushes) {
    history.pushes = history.pushState;
    let target = null;
    history.pushState = (...entry) => {
        (target ? history.replaceState : history.pushes).apply(history, entry);
        const to = new URLSearchParams(location.search).get('to');
        if (to || (location.pathname.split('/').pop() || 'map') === target) target = to;
    };
}
