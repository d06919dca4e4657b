// SPDX-License-Identifier: Apache-2.0
// From the integers of a transformed group to binary32 values: section 9.5.
const ZERO = 128; // TRF-3
const { fround } = Math;

/** [C_p, S_p] of each pair at position p, found in binary64 and rounded to binary32. A position may have 40 bits. */
export function turns({ cos, sin }, position) {
  const C = new Float32Array(cos.length);
  const S = new Float32Array(cos.length);
  for (let i = 0; i < cos.length; i++) {
    let [c, s, Cp, Sp] = [cos[i], sin[i], 1, 0];
    for (let bits = position; bits > 0; bits = Math.floor(bits / 2)) {
      if (bits % 2 === 1) [Cp, Sp] = [Cp * c - Sp * s, Cp * s + Sp * c];
      [c, s] = [c * c - s * s, c * s + s * c];
    }
    C[i] = Cp;
    S[i] = Sp;
  }
  return [C, S];
}

/** Rotate each head of one row in place. */
function rotate(row, heads, D, pairing, [C, S]) {
  const n = C.length;
  for (let h = 0; h < heads; h++) {
    for (let i = 0; i < n; i++) {
      const u = h * D + (pairing === 'half' ? i : 2 * i);
      const v = pairing === 'half' ? u + n : u + 1;
      const [a, b] = [row[u], row[v]];
      row[u] = fround(fround(a * C[i]) - fround(b * S[i]));
      row[v] = fround(fround(b * C[i]) + fround(a * S[i]));
    }
  }
}

/**
 * Values of one layer of a segment, row by row: `q` holds its integers [token, head, dim] over all heads, `factors` the
 * token scale of each token or is null, and `put` gets each token's number and its row [head, dim], which is used again.
 */
export function restoreRows(q, { heads, D, firstPosition }, scale, factors, transform, put) {
  const { mean, rowScale, matrix, pairing, cos } = transform;
  const C = heads * D;
  const slots = new Int32Array(C); // slot k = d * H + h
  const row = new Float32Array(C); // channel c = h * D + d
  for (let t = 0; t < q.length / C; t++) {
    for (let h = 0; h < heads; h++) for (let d = 0; d < D; d++) slots[d * heads + h] = q[t * C + h * D + d] - ZERO;
    for (let c = 0; c < C; c++) {
      let a = 0; // below 2^24 at every step (PRF-4), so exact
      for (let k = 0, at = c * C; k < C; k++, at++) a += slots[k] * matrix[at];
      let z = fround(fround(a * rowScale[c]) * scale);
      if (factors !== null) z = fround(z * factors[t]);
      row[c] = z + mean[c]; // rounded by the array
    }
    if (cos.length > 0) rotate(row, heads, D, pairing, turns(transform, firstPosition + t));
    put(t, row);
  }
}
