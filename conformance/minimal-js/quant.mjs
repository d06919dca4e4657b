// SPDX-License-Identifier: Apache-2.0
// From integers to the bits of the dtype: section 9.4. Every operation is rounded to binary32 on its own.
import { restoreRows } from './transform.mjs';

const CLAMP = { // largest finite magnitudes as binary32 bits
  float32: 0x7f7fffff, float16: 0x477fe000, bfloat16: 0x7f7f0000, float8_e4m3fn: 0x43e00000, float8_e5m2: 0x47600000,
};
const FORMAT = { float16: [5, 10], bfloat16: [8, 7], float8_e4m3fn: [4, 3], float8_e5m2: [5, 2] }; // exponent, mantissa

/** v / 2^shift, to nearest, ties to even; shift is 1 to 24 and v below 2^31. */
const halfEven = (v, shift) => (v + (2 ** (shift - 1) - 1) + ((v >>> shift) & 1)) >>> shift;

/** Round finite binary32 bits to a narrower dtype (ARI-4). */
export function narrow(bits, dtype) {
  const [exponentBits, mantissaBits] = FORMAT[dtype];
  const sign = (bits >>> 31) << (exponentBits + mantissaBits);
  const magnitude = Math.min(bits & 0x7fffffff, CLAMP[dtype]);
  const bias = 2 ** (exponentBits - 1) - 1;
  const exponent = (magnitude >>> 23) - 127 + bias; // biased exponent in the narrower format
  const shift = 23 - mantissaBits;
  if (exponent >= 1 || bias === 127) return sign | halfEven(magnitude - (127 - bias) * 2 ** 23, shift);
  // Subnormal: the hidden bit becomes explicit and moves right. Above 24 places even a tie is out of reach.
  const places = shift + 1 - exponent;
  return places > 24 ? sign : sign | halfEven((magnitude & 0x7fffff) | 0x800000, places);
}

/** The bytes of a segment [layer, token, head, dim] of a dtype, filled row by row. */
class Elements {
  constructor(rows, width, dtype) {
    Object.assign(this, { width, dtype });
    const bits = dtype === 'float32' ? 32 : 1 + FORMAT[dtype][0] + FORMAT[dtype][1];
    this.out = new { 8: Uint8Array, 16: Uint16Array, 32: Uint32Array }[bits](rows * width);
  }

  /** `row` holds the binary32 values of row number `n`, [head, dim]. */
  put(n, row) {
    const bits = new Uint32Array(row.buffer);
    const at = n * this.width;
    if (this.dtype === 'float32') this.out.set(bits, at);
    else for (let c = 0; c < this.width; c++) this.out[at + c] = narrow(bits[c], this.dtype);
  }

  /** The bytes, with the rows of the patches in place (ARI-5). */
  patched(patches, N) {
    const bytes = Buffer.from(this.out.buffer);
    for (const { layer, token, row } of patches) bytes.set(row, (layer * N + token) * row.length);
    return bytes;
  }
}

/** Restore a segment of a quantised group: bytes of [layer, token, head, dim]. */
export function restore(q, segment, D, dtype, parameters, side) {
  const { layerCount: n, tokenCount: N, headCount } = segment;
  const { scale, zero, bias, tokenScale } = parameters;
  const { fround } = Math;
  const width = headCount * D;
  const row = new Float32Array(width);
  const out = new Elements(n * N, width, dtype);
  for (let l = 0, at = 0; l < n; l++) {
    for (let t = 0; t < N; t++, at += width) {
      const factor = side.index === null ? 1 : tokenScale[side.index[l * N + t]];
      for (let c = 0; c < width; c++) {
        const k = l * width + c;
        let x = fround((q[at + c] - zero[k]) * scale[k]);
        if (side.index !== null) x = fround(x * factor);
        if (bias !== null) x = fround(x + bias[k]);
        row[c] = x;
      }
      out.put(l * N + t, row);
    }
  }
  return out.patched(side.patches, N);
}

/** The same of a transformed group, which holds all heads. `transforms` has one element per layer of the segment. */
export function restoreTransformed(q, segment, group, firstPosition, set, side, transforms) {
  const { layerCount: n, tokenCount: N, tokenStart } = segment;
  const { heads, head_dim: D, dtype } = group;
  const width = heads * D;
  const out = new Elements(n * N, width, dtype);
  const shape = { heads, D, firstPosition: firstPosition + tokenStart };
  for (let l = 0; l < n; l++) {
    const layer = q.subarray(l * N * width, (l + 1) * N * width);
    const factors = side.index === null ? null : Array.from(side.index.subarray(l * N, (l + 1) * N), (i) => set.tokenScale[i]);
    restoreRows(layer, shape, set.scale[l], factors, transforms[l], (t, row) => out.put(l * N + t, row));
  }
  return out.patched(side.patches, N);
}
