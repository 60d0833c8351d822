// A table of Streamlit's has no name for screen readers: its title, or the titles of its first columns.
if (!window.tablesNamed) {
    const NAMED = 4; // columns
    const nameOf = grid => {
        const place = grid.closest('[data-testid=stElementContainer]'), above = place?.previousElementSibling;
        const title = above ? above.querySelector('[data-testid=stMarkdown]')
            : grid.closest('[data-testid=stExpander]')?.querySelector('summary [data-testid=stMarkdownContainer]');
        const columns = [...grid.querySelectorAll('[role=columnheader]')].map(each => each.textContent.trim()).filter(Boolean);
        return title?.textContent.trim() || `Table of ${columns.slice(0, NAMED).join(', ')}`;
    };
    const nameAll = () => document.querySelectorAll('[data-testid=stDataFrame] [role=grid]:not([aria-label])')
        .forEach(grid => grid.setAttribute('aria-label', nameOf(grid)));
    window.tablesNamed = new MutationObserver(nameAll);
    window.tablesNamed.observe(document.body, { childList: true, subtree: true });
}
