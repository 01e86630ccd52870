// [what, contrast, least] of everything that can be seen on a page, as WCAG counts it.
() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const rgba = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = (color) => {
        const [r, g, b] = rgba(color).slice(0, 3).map((value) => {
            const part = value / 255;
            return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
        for (; element; element = element.parentElement) {
            const color = getComputedStyle(element).backgroundColor;
            if (rgba(color)[3] === 255) return color;
        }
        throw new Error("nothing is behind");
    };
    const contrast = (a, b) => {
        const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
        return (high + 0.05) / (low + 0.05);
    };
    const found = [];
    const add = (element, color, least, what) =>
        found.push([what, contrast(color, behind(element)), least]);
    for (const element of document.querySelectorAll("body *")) {
        if (!element.checkVisibility({ visibilityProperty: true })) continue;
        const texts = [...element.childNodes].filter((n) => n.nodeType === 3 && n.data.trim());
        const isField = element.matches("input, select, textarea");
        const style = getComputedStyle(element);
        if (texts.length || isField) add(element, style.color, 4.5, texts[0]?.data ?? element.name);
        const placeholder = getComputedStyle(element, "::placeholder").color;
        if (isField) add(element, placeholder, 4.5, "placeholder of " + element.name);
        if (isField && style.borderStyle === "solid") {
            add(element.parentElement, style.borderColor, 3, "edge of " + element.name);
        }
        if (element.matches("path.line")) add(element, style.stroke, 3, "line");
    }
    return found;
}
