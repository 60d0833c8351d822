// The links of SKIP in main.py: what a keyboard comes for is a few Tab stops away, whatever the header and the bar hold.
if (!window.skips) {
    window.skips = {
        filter: '.st-key-scope button',
        table: '.explore tbody [tabindex="0"], .map .grid[tabindex="0"], .map [role=grid], [data-testid=stDataFrame] canvas',
        charts: '.chart button, .map button',
    };
    document.addEventListener('click', event => {
        const name = event.target.closest?.('.skip a')?.hash.slice(1);
        if (!name) return;
        event.preventDefault();
        const wanted = [...document.querySelectorAll(window.skips[name])].find(element => element.checkVisibility());
        wanted?.focus({ focusVisible: true });
    });
}
