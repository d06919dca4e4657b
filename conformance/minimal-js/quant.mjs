// SPDX-License-Identifier: Apache-2.0
// From integers to the bits of the dtype: section 9.4. Every operation is rounded to binary32 on its own.

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

/** Restore a segment of a quantised group: bytes of [layer, token, head, dim]. */
export function restore(q, segment, D, dtype, parameters, side) {
  const { layerCount: n, tokenCount: N, headCount } = segment;
  const { scale, zero, bias, tokenScale } = parameters;
  const { fround } = Math;
  const width = headCount * D;
  const row = new Float32Array(width);
  const rowBits = new Uint32Array(row.buffer);
  const Out = dtype === 'float32' ? Uint32Array : FORMAT[dtype][0] + FORMAT[dtype][1] === 7 ? Uint8Array : Uint16Array;
  const out = new Out(n * N * width);
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
      if (dtype === 'float32') out.set(rowBits, at);
      else for (let c = 0; c < width; c++) out[at + c] = narrow(rowBits[c], dtype);
    }
  }
  const bytes = Buffer.from(out.buffer);
  for (const { layer, token, row: patch } of side.patches) bytes.set(patch, (layer * N + token) * patch.length);
  return bytes;
}
