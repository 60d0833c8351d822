// Applies what is typed into Streamlit's text area after a pause, as Ctrl+Enter would.
const PAUSE = 400; // milliseconds

export default function ({ data }) {
    let timer;
    const onInput = ({ target }) => {
        if (target.tagName !== 'TEXTAREA' || target.getAttribute('aria-label') !== data.label) return;
        clearTimeout(timer);
        const apply = { key: 'Enter', code: 'Enter', keyCode: 13, ctrlKey: true, bubbles: true };
        timer = setTimeout(() => target.dispatchEvent(new KeyboardEvent('keydown', apply)), PAUSE);
    };
    document.addEventListener('input', onInput);
    return () => {
        clearTimeout(timer);
        document.removeEventListener('input', onInput);
    };
}
