// SPDX-License-Identifier: Apache-2.0
// Returns sentences on what is wrong with the page as it stands in the window,
// which is as high as the page.
(() => {
  const problems = [];
  const say = (text) => { if (!problems.includes(text)) problems.push(text); };
  const root = document.documentElement;
  const short = (s) => JSON.stringify(s.trim().replace(/\s+/g, ' ').slice(0, 60));
  const all = (selector) => [...document.querySelectorAll(selector)];
  // Text for screen readers alone is cut off from the picture.
  const away = (e) => { for (; e; e = e.parentElement) if (getComputedStyle(e).clipPath === 'inset(50%)') return true; return false; };
  const shown = (e) => e.checkVisibility({ visibilityProperty: true }) && e.getClientRects().length > 0;

  // The window.
  if (root.scrollWidth > root.clientWidth) {
    const out = all('body *').filter((e) => e.getBoundingClientRect().right > root.clientWidth + 1 && !e.closest('.scroll'));
    say(`the page is ${root.scrollWidth} px wide in a window of ${root.clientWidth}: ${out.slice(0, 3).map((e) => e.tagName + '.' + (e.className.baseVal ?? e.className))}`);
  }

  // Colours, by way of a canvas, which knows every way to write one.
  const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const colors = new Map();
  const color = (text) => {
    if (!colors.has(text)) {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = text;
      context.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
      colors.set(text, { r, g, b, a: a / 255 });
    }
    return colors.get(text);
  };
  const over = (top, below) => ({
    r: top.r * top.a + below.r * (1 - top.a), g: top.g * top.a + below.g * (1 - top.a), b: top.b * top.a + below.b * (1 - top.a), a: 1,
  });
  const luminance = (c) => {
    const f = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(c.r) + 0.7152 * f(c.g) + 0.0722 * f(c.b);
  };
  const contrast = (a, b) => {
    const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const opacity = (e) => { let o = 1; for (; e; e = e.parentElement) o *= parseFloat(getComputedStyle(e).opacity); return o; };
  const paint = (e) => {
    const style = getComputedStyle(e);
    const svg = e instanceof SVGElement && e.tagName !== 'svg';
    const text = svg ? (['rect', 'circle', 'ellipse', 'polygon'].includes(e.tagName) ? style.fill : 'none') : style.backgroundColor;
    if (text === 'none') return { r: 0, g: 0, b: 0, a: 0 };
    const c = { ...color(text) };
    if (svg) c.a *= parseFloat(style.fillOpacity);
    c.a *= opacity(e);
    return c;
  };
  // What lies behind a point: painted things from the top down.
  const behind = (layers) => {
    const stack = [];
    for (const e of layers) {
      const c = paint(e);
      if (c.a > 0) stack.push(c);
      if (c.a === 1) break;
    }
    const canvas = document.createElement('div');
    canvas.style.color = 'Canvas';
    return stack.reverse().reduce((below, c) => over(c, below), matchMedia('(prefers-color-scheme: dark)').matches ? color('#121212') : color('#fff'));
  };

  // Texts.
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n; (n = walker.nextNode());) {
    const e = n.parentElement;
    if (!n.data.trim() || e.closest('title, desc, style, script') || !shown(e) || away(e)) continue;
    const range = document.createRange();
    range.selectNodeContents(n);
    const rects = [...range.getClientRects()].filter((r) => r.width > 0.5 && r.height > 0.5);
    for (const rect of rects) texts.push({ node: n, e, rect });
    if (!rects.length) { say(`the text ${short(n.data)} is not to be seen`); continue; }
    const svg = e.closest('svg');
    const style = getComputedStyle(e);
    let scale = 1;
    if (svg) { const m = e.getScreenCTM(); scale = Math.hypot(m.a, m.b); }
    const size = parseFloat(style.fontSize) * scale;
    if (size < 11) say(`the text ${short(n.data)} is ${size.toFixed(1)} px high`);
    const r = rects[0];
    let layers = [];
    if (svg) {
      layers = document.elementsFromPoint(r.x + r.width / 2, r.y + r.height / 2).filter((l) => !l.closest('text'));
      const frame = svg.getBoundingClientRect();
      if (rects.some((t) => t.left < frame.left - 0.5 || t.right > frame.right + 0.5 || t.top < frame.top - 0.5 || t.bottom > frame.bottom + 0.5)) {
        say(`the text ${short(n.data)} goes beyond its drawing`);
      }
      const tile = e.parentElement.matches('a, g') && e.parentElement.querySelector('rect');
      if (tile) {
        const b = tile.getBoundingClientRect();
        if (rects.some((t) => t.left < b.left - 0.5 || t.right > b.right + 0.5)) say(`the text ${short(n.data)} goes beyond its box`);
      }
    } else {
      for (let a = e; a; a = a.parentElement) layers.push(a);
    }
    const back = behind(layers);
    const ink = { ...color(svg ? style.fill : style.color) };
    ink.a *= opacity(e);
    const ratio = contrast(over(ink, back), back);
    const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) say(`the text ${short(n.data)} stands out from its ground by ${ratio.toFixed(2)} only`);
  }
  texts.sort((a, b) => a.rect.top - b.rect.top);
  for (let i = 0; i < texts.length; i++) {
    for (let j = i + 1; j < texts.length && texts[j].rect.top < texts[i].rect.bottom; j++) {
      const a = texts[i].rect, b = texts[j].rect;
      const x = Math.min(a.right, b.right) - Math.max(a.left, b.left), y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      // Boxes of letters are higher than the letters.
      if (x > 1 && y > Math.min(a.height, b.height) * 0.35) say(`the texts ${short(texts[i].node.data)} and ${short(texts[j].node.data)} cover each other`);
    }
  }
  for (const e of all('body *')) {
    if (!(e instanceof HTMLElement) || !shown(e) || away(e) || e.matches('.scroll')) continue;
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 && getComputedStyle(e).display !== 'inline' && !e.querySelector('.scroll')) {
      say(`${e.tagName} ${short(e.textContent)} is ${e.scrollWidth} px wide in ${e.clientWidth}`);
    }
  }

  // What a screen reader is told.
  if (!root.lang) say('the page has no language');
  if (!document.title) say('the page has no title');
  if (all('h1').length !== 1) say(`the page has ${all('h1').length} main headings`);
  if (all('main').length !== 1) say(`the page has ${all('main').length} main parts`);
  let level = 0;
  for (const h of all('h1, h2, h3, h4, h5, h6')) {
    const l = +h.tagName[1];
    if (l > level + 1) say(`the heading ${short(h.textContent)} skips a level`);
    level = l;
  }
  for (const t of all('table')) {
    if (!t.caption?.textContent.trim()) say(`a table has no caption: ${short(t.textContent)}`);
    for (const th of t.querySelectorAll('th')) if (!th.scope) say(`the heading ${short(th.textContent)} does not say of what`);
  }
  for (const s of all('svg')) {
    if (s.getAttribute('aria-hidden') === 'true') continue;
    if (!s.getAttribute('role') || !s.querySelector(':scope > title')?.textContent || !s.querySelector(':scope > desc')?.textContent) say('a drawing has no role, title or description');
  }
  const ids = all('[id]').map((e) => e.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) say(`two things are called ${id}`);
  for (const e of all('[aria-labelledby]')) {
    for (const id of e.getAttribute('aria-labelledby').split(' ')) if (!document.getElementById(id)) say(`nothing is called ${id}`);
  }
  for (const a of all('a')) {
    const to = a.getAttribute('href') ?? '';
    if (to.startsWith('#') && !document.getElementById(to.slice(1))) say(`the link ${short(a.textContent)} leads nowhere: ${to}`);
  }
  if (all('[style]').length) say('there is a style attribute');
  if (all('script, iframe, object, embed, form, base').length) say('there is a script, a frame or a form');
  return problems;
})()
