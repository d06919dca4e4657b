// SPDX-License-Identifier: Apache-2.0
// The cells of section 7.3. All factors are below 2^53, and products only grow, so a rounded product never
// compares below a limit that the exact one exceeds (CNV-3).

/** Token interval that a group holds, the state's pseudo-token included. */
export function held(group, T) {
  if (group.tokens.kind === 'state') return [0, 1];
  return [group.tokens.kind === 'window' ? group.tokens.held_start : 0, T];
}

/** First and last + 1 of the block numbers b of a group. */
function blocks(group, T, S) {
  if (group.tokens.kind === 'state') return [Math.ceil(T / S), Math.ceil(T / S) + 1];
  const [start, stop] = held(group, T);
  return start < stop ? [Math.floor(start / S), Math.ceil(stop / S)] : [0, 0];
}

/** Number of cells, without listing them (TAB-2). */
export function countCells(m) {
  return m.groups.reduce((sum, group, g) => {
    const cut = m.segmentation.groups[g];
    const [first, stop] = blocks(group, m.tokens.count, m.segmentation.tokens);
    return sum + (stop - first) * Math.ceil(group.layers.length / cut.layers) * Math.ceil(group.heads / cut.heads);
  }, 0);
}

/** Tokens of the longest segment of a group. */
export function longestBlock(group, T, S) {
  const [first, stop] = blocks(group, T, S);
  if (group.tokens.kind === 'state') return 1;
  if (first === stop) return 0;
  const [start, end] = held(group, T);
  if (stop - first > 2) return S;
  return Math.max(Math.min(S * (first + 1), end) - start, end - Math.max(S * (stop - 1), start));
}

/** All cells in the order of a segment table (SEG-2, SEG-3). Call it when their number is known to be legal. */
export function listCells(m) {
  const T = m.tokens.count;
  const S = m.segmentation.tokens;
  const cells = [];
  m.groups.forEach((group, g) => {
    const cut = m.segmentation.groups[g];
    const [start, end] = held(group, T);
    const [first, stop] = blocks(group, T, S);
    for (let layer = 0; layer < group.layers.length; layer += cut.layers) {
      for (let head = 0; head < group.heads; head += cut.heads) {
        for (let b = first; b < stop; b++) {
          const state = group.tokens.kind === 'state';
          const tokenStart = state ? 0 : Math.max(S * b, start);
          cells.push({
            group: g,
            layerIndex: layer,
            layerCount: Math.min(cut.layers, group.layers.length - layer),
            headStart: head,
            headCount: Math.min(cut.heads, group.heads - head),
            tokenStart,
            tokenCount: (state ? 1 : Math.min(S * (b + 1), end)) - tokenStart,
            block: b,
            firstLayer: group.layers[layer],
          });
        }
      }
    }
  });
  const keys = m.segmentation.order === 'token-major'
    ? ['block', 'firstLayer', 'group', 'headStart']
    : ['firstLayer', 'group', 'headStart', 'block'];
  return cells.sort((a, b) => {
    for (const key of keys) if (a[key] !== b[key]) return a[key] - b[key];
    return 0;
  });
}
