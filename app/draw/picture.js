// Saves charts: as SVG or PNG with the caption below, and files unchanged. Used by the app's export menu and by reports.
function save(content, type, name) {
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// kind: 'svg' or 'png'; chart: the <svg> that is shown; caption: Figure.caption_svg.
async function savePicture(kind, chart, caption, { ground, text, font }, name) {
    const { width, height } = chart.viewBox.baseVal;
    const [w, h] = [Math.max(width, caption.width), height + caption.height];
    const copy = chart.cloneNode(true);
    copy.setAttribute('width', width);
    copy.setAttribute('height', height);
    const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${w}" height="${h}" viewBox="0 0 ${w} ${h}">`
        + `<rect width="${w}" height="${h}" fill="${ground}"/>${new XMLSerializer().serializeToString(copy)}`
        + `<g transform="translate(0 ${height})" fill="${text}" font-family="${font.replaceAll('"', "'")}">`
        + `${caption.svg}</g></svg>`;
    if (kind === 'svg') return save(svg, 'image/svg+xml', `${name}.svg`);
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
    await image.decode();
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [2 * w, 2 * h];
    canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob(blob => save(blob, 'image/png', `${name}.png`));
}
