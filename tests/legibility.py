"""Checks that people can read the texts of a page, in light and dark."""

from typing import Any

IS_DARK = "matchMedia('(prefers-color-scheme: dark)').matches"

# Contrast as WCAG defines it. Exempt, as there: controls that are disabled. Also exempt: what is dimmed on request.
TEXTS = """() => {
    const channels = text => {
        const found = /^rgba?\\((.*)\\)$/.exec(text);
        if (!found) throw new Error(`cannot read the color ${text}`);
        const [red, green, blue, alpha = 1] = found[1].match(/[\\d.]+/g).map(Number);
        return {color: [red, green, blue], alpha};
    };
    const over = ({color, alpha}, below) => color.map((each, place) => each * alpha + below[place] * (1 - alpha));
    const luminance = color => {
        const [red, green, blue] = color
            .map(each => each / 255)
            .map(each => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const contrast = (one, other) => {
        const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const probe = document.documentElement.appendChild(document.createElement("i"));
    probe.style.backgroundColor = "Canvas";
    const canvas = channels(getComputedStyle(probe).backgroundColor).color;
    probe.remove();
    // Returns the color of an element's background with all that is behind it, and the opacity of what is around it.
    const known = new Map([[null, {below: canvas, groups: []}]]);
    const around = element => {
        if (known.has(element)) return known.get(element);
        let {below, groups} = around(element.parentElement);
        const style = getComputedStyle(element);
        if (style.backgroundImage !== "none") throw new Error(`a text has a picture behind it: ${element.outerHTML}`);
        if (style.opacity !== "1") groups = [{alpha: Number(style.opacity), below}, ...groups];
        below = over(channels(style.backgroundColor), below);
        known.set(element, {below, groups});
        return {below, groups};
    };
    // Returns the color behind a text, and a function that applies the opacity of the elements around it.
    const behind = element => {
        let {below, groups} = around(element);
        if (element.ownerSVGElement) {
            const text = element.getBBox();
            for (const shape of element.parentElement.querySelectorAll(":scope > rect")) {
                const box = shape.getBBox();
                const isInside = box.x <= text.x && text.x + text.width <= box.x + box.width;
                if (isInside) below = over(channels(getComputedStyle(shape).fill), below);
            }
        }
        const seen = color => groups.reduce((top, group) => over({color: top, alpha: group.alpha}, group.below), color);
        return {below, seen};
    };
    const found = [];
    const check = (element, text, style = getComputedStyle(element)) => {
        const {below, seen} = behind(element);
        const own = channels(element.ownerSVGElement ? style.fill : style.color);
        if (style !== getComputedStyle(element) && style.opacity !== "1") own.alpha *= Number(style.opacity);
        const color = seen(over(own, below));
        found.push([text.trim().slice(0, 40), contrast(color, seen(below)), color.join(" "), seen(below).join(" ")]);
    };
    const isShown = element =>
        element.checkVisibility({visibilityProperty: true, contentVisibilityAuto: true}) &&
        Math.min(element.getBoundingClientRect().width, element.getBoundingClientRect().height) > 1 &&
        !element.closest(":disabled, [aria-disabled=true], .dim, .unseen, .skip:not(:focus)");
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (walker.currentNode.data.trim() && isShown(element) && !element.closest("script, style, option, textarea"))
            check(element, walker.currentNode.data);
    }
    for (const element of document.querySelectorAll("input:not([type=checkbox]), textarea, select")) {
        if (!isShown(element)) continue;
        if (element.value) check(element, element.value);
        else if (element.placeholder) check(element, element.placeholder, getComputedStyle(element, "::placeholder"));
    }
    return [
        matchMedia("(prefers-color-scheme: dark)").matches,
        found.length > 0,
        found.filter(([, ratio]) => ratio < 4.5),
    ];
}"""


def illegible_texts(tab: Any) -> list[Any]:
    """Return the texts of the tab that have too little contrast with what is behind them, in light and in dark."""
    found: list[Any] = []
    is_dark, there_are_texts, illegible = tab.evaluate(TEXTS)
    first, other = ("dark", "light") if is_dark else ("light", "dark")
    if not there_are_texts:
        found.append(f"the tab shows no text in {first}")
    found += [(first, *each) for each in illegible]
    tab.emulate_media(color_scheme=other)
    is_dark, there_are_texts, illegible = tab.evaluate(TEXTS)
    if is_dark != (other == "dark") or not there_are_texts:
        found.append(f"the tab shows no text, or not in {other}")
    found += [(other, *each) for each in illegible]
    tab.emulate_media(color_scheme=first)
    return found
