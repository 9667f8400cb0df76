"""What tests have a browser do in a page."""

from __future__ import annotations

#: {words of an element: [pixels, contrast]} of what shows text; what is behind charts is the card they lie on.
LOOK_AT_TEXT = """() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([red, green, blue]) => [red, green, blue]
    .map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const { width, height } = element.getBoundingClientRect();
    const isChart = element instanceof SVGElement;
    if (!own || !width || !height || element.closest("script, style, option, .bartext, .textpoint")) continue;
    const style = getComputedStyle(element);
    const [one, other] = [light(parse(isChart ? style.fill : style.color)), light(behind(element))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    found[`${element.tagName} ${element.textContent.trim().slice(0, 40)}`] = [parseFloat(style.fontSize), contrast];
  }
  return found;
}"""

#: {chart and axis: the words at its ticks}
TICKS = """() => {
  const found = {};
  for (const tick of document.querySelectorAll("g.xtick, g.ytick, g[class$=tick]")) {
    const axis = `${tick.closest(".chart").id} ${tick.getAttribute("class")}`;
    (found[axis] ??= []).push(tick.textContent);
  }
  return found;
}"""

#: What of charts lies on something else: legends on plots or buttons, words of legends outside of them, words on words.
OVERLAPS = """() => {
  const box = (element) => element.getBoundingClientRect();
  const slack = 0.5;
  const meet = (one, other) => Math.min(one.right, other.right) - Math.max(one.left, other.left) > slack
    && Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > slack;
  const found = [];
  for (const chart of document.querySelectorAll(".chart")) {
    const frame = chart.querySelector(".legend .bg");  // None where a chart has one series.
    const legend = frame ? box(frame) : new DOMRect();
    for (const plot of chart.querySelectorAll(".nsewdrag")) {
      if (meet(legend, box(plot))) found.push(`${chart.id}: legend on plot`);
    }
    for (const button of chart.querySelectorAll(".modebar-group")) {
      if (meet(legend, box(button))) found.push(`${chart.id}: legend under buttons`);
    }
    for (const text of chart.querySelectorAll(".legendtext")) {
      const { bottom, right } = box(text);
      const isCut = bottom > legend.bottom + slack || right > box(chart).right;
      if (isCut) found.push(`${chart.id}: ${text.textContent} is cut`);
    }
    const texts = [...chart.querySelectorAll(".legendtext, .annotation-text, [class$=tick] text, text[class*=title]")];
    for (const [place, text] of texts.entries()) {
      for (const other of texts.slice(place + 1)) {
        if (meet(box(text), box(other))) found.push(`${chart.id}: ${text.textContent} on ${other.textContent}`);
      }
    }
  }
  return found;
}"""

TRY_TO_LEAVE = """async (address) => {
  const image = document.createElement("img");
  const failed = new Promise((resolve) => { image.onerror = () => resolve("blocked"); });
  image.src = `${address}image.png`;
  document.body.append(image);
  const script = document.createElement("script");
  script.textContent = "window.hacked = true";
  document.body.append(script);
  const fetched = fetch(address).catch(() => "blocked");
  const unanswered = new Promise((resolve) => setTimeout(() => resolve("unanswered"), 5000));
  const outcomes = [failed, fetched].map((each) => Promise.race([each, unanswered]));
  return [...await Promise.all(outcomes), window.hacked ?? "blocked"];
}"""
