// The element in focus; whether it is marked so; how many were in focus so far, and how many can be.
() => {
    const element = document.activeElement;
    const kinds = "button, input, select, textarea, summary, [tabindex]";
    const isShown = (each) => each.checkVisibility({ visibilityProperty: true });
    const all = [...document.querySelectorAll(kinds)].filter(isShown);
    window.seen ??= new Set();
    window.seen.add(element);
    const hasRing = (style) => style.outlineStyle !== "none" || style.boxShadow !== "none";
    return {
        name: element.id || element.className || element.textContent,
        is_marked:
            all.includes(element) &&
            [element, element.closest(".composer") ?? element].map((each) => getComputedStyle(each)).some(hasRing),
        num_seen: window.seen.size,
        num_all: all.length,
    };
}
