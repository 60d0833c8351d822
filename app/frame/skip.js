// The links of SKIP in main.py: what a keyboard comes for is a few Tab stops away, whatever the header and the bar hold.
if (!window.skips) {
    window.skips = {
        filter: '.st-key-scope button',
        table: '.explore tbody [tabindex="0"], .cell[tabindex="0"], [data-testid=stDataFrame] canvas',
        charts: '.chart button, .cell[tabindex="0"]',
    };
    // Of the page and of the components that keep their elements apart, in the order of the page.
    const every = (root, wanted) => [...root.querySelectorAll(`${wanted}, [data-testid=stBidiComponentIsolated]`)]
        .flatMap(element => element.shadowRoot ? every(element.shadowRoot, wanted) : element.matches(wanted) ? [element] : []);
    document.addEventListener('click', event => {
        const name = event.target.closest?.('.skip a')?.hash.slice(1);
        if (!name) return;
        event.preventDefault();
        const wanted = every(document, window.skips[name]).find(element => element.checkVisibility());
        wanted?.focus({ focusVisible: true });
    });
}
