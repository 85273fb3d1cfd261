// SPDX-License-Identifier: Apache-2.0
// Returns where the focus is: the number of the focused element among those
// that can have it, how many there are, and whether it shows.
(() => {
  const shown = (e) => e.checkVisibility({ visibilityProperty: true }) && e.getClientRects().length > 0;
  const stops = [...document.querySelectorAll('a[href], [tabindex="0"]')].filter(shown);
  const e = document.activeElement;
  const at = stops.indexOf(e);
  let visible = false;
  if (at >= 0) {
    const style = getComputedStyle(e);
    const tile = e.querySelector('.tile');
    visible = (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2) || (tile !== null && parseFloat(getComputedStyle(tile).strokeWidth) >= 3);
  }
  return { at, of: stops.length, visible, text: (e.textContent ?? '').trim().slice(0, 40) };
})()
