// SPDX-License-Identifier: Apache-2.0
// The writer's side of section 9: one scale and bias per channel, patches for tokens that do not fit.
import { Failure } from './failure.mjs';

export const RELATIVE_STEP = 0.24; // "near-lossless"
const ZERO = 128;
const FLAGS = 1 | 4; // scale and bias per channel
const FORMAT = { float16: [5, 10], bfloat16: [8, 7], float8_e4m3fn: [4, 3], float8_e5m2: [5, 2] }; // exponent, mantissa
const tables = new Map();

/** The values of all codes of a narrow dtype; NaN stands for infinity, too. */
function valueTable(dtype) {
  if (tables.has(dtype)) return tables.get(dtype);
  const [exponentBits, mantissaBits] = FORMAT[dtype];
  const bias = 2 ** (exponentBits - 1) - 1;
  const top = 2 ** exponentBits - 1;
  const value = (code) => {
    const sign = code >> (exponentBits + mantissaBits) ? -1 : 1;
    const exponent = (code >> mantissaBits) & top;
    const mantissa = code & (2 ** mantissaBits - 1);
    const special = dtype === 'float8_e4m3fn' ? exponent === top && mantissa === 7 : exponent === top;
    if (special) return NaN;
    return sign * (exponent === 0 ? mantissa * 2 ** (1 - bias - mantissaBits) : (1 + mantissa / 2 ** mantissaBits) * 2 ** (exponent - bias));
  };
  const table = Float32Array.from({ length: 2 ** (1 + exponentBits + mantissaBits) }, (_, code) => value(code));
  tables.set(dtype, table);
  return table;
}

/** Elements as numbers; NaN and infinity are refused (ARI-7). */
export function numbers(bytes, dtype, where) {
  const copy = Uint8Array.prototype.slice.call(bytes).buffer; // aligned
  let out;
  if (dtype === 'float32') {
    out = new Float32Array(copy);
  } else {
    const table = valueTable(dtype);
    out = Float32Array.from(table.length === 256 ? new Uint8Array(copy) : new Uint16Array(copy), (code) => table[code]);
  }
  if (!out.every(Number.isFinite)) throw new Failure('input.non-finite', where, 'NaN or infinity in a group to be quantised (ARI-7)');
  return out;
}

/** Sums per channel [layer, head, dim], from which the parameters of a layer run follow. */
export class Statistics {
  constructor(layers, width) {
    Object.assign(this, { layers, width, count: 0, sum: new Float64Array(layers * width), squares: new Float64Array(layers * width) });
  }

  /** `x` is [layer, token, channel]. */
  add(x) {
    const { layers, width, sum, squares } = this;
    const tokens = x.length / (layers * width);
    for (let l = 0, at = 0; l < layers; l++) {
      for (let t = 0; t < tokens; t++) {
        for (let c = l * width; c < (l + 1) * width; c++, at++) {
          sum[c] += x[at];
          squares[c] += x[at] * x[at];
        }
      }
    }
    this.count += tokens;
  }

  /** scale and bias per channel, inside the ranges of SET-4 and SET-5. */
  parameters() {
    const scale = new Float32Array(this.sum.length);
    const bias = new Float32Array(this.sum.length);
    this.sum.forEach((sum, c) => {
      const mean = Math.fround(sum / this.count);
      const variance = Math.max(0, this.squares[c] / this.count - (sum / this.count) ** 2);
      scale[c] = Math.min(Math.max(RELATIVE_STEP * Math.sqrt(variance), 2 ** -40), 2 ** 40);
      bias[c] = Math.abs(mean) >= 2 ** -64 && Math.abs(mean) <= 2 ** 96 ? mean : 0;
    });
    return { scale, bias };
  }
}

/** The bytes of a quantisation set (section 9.2). */
export function setBytes({ scale, bias }, layers, H, D) {
  const head = Buffer.alloc(16);
  head.writeUInt16LE(layers, 0);
  head.writeUInt16LE(FLAGS, 2);
  head.writeUInt32LE(H, 4);
  head.writeUInt32LE(D, 8);
  const zero = new Int16Array(layers).fill(ZERO);
  return Buffer.concat([head, ...[scale, zero, bias].map((array) => Buffer.from(array.buffer))]);
}

/**
 * Integers and side block of a segment. `x` is [layer, token, channel] as numbers, `exact` the same as bytes, and
 * `firstChannel(layer)` says where its channels begin in scale and bias.
 */
export function quantise(x, exact, layers, { scale, bias }, firstChannel, width) {
  const tokens = x.length / (layers * width);
  const rowBytes = exact.length / (layers * tokens);
  const q = Buffer.alloc(x.length, ZERO);
  const side = [];
  for (let l = 0; l < layers; l++) {
    const patched = [];
    for (let t = 0; t < tokens; t++) {
      const at = (l * tokens + t) * width;
      let fits = true;
      for (let c = 0; c < width && fits; c++) {
        const k = firstChannel(l) + c;
        const step = Math.round((x[at + c] - bias[k]) / scale[k]) + ZERO;
        fits = step >= 0 && step <= 255;
        q[at + c] = step;
      }
      if (fits) continue;
      q.fill(ZERO, at, at + width); // SID-4
      patched.push(t);
    }
    side.push(Buffer.from(Uint32Array.of(patched.length).buffer), Buffer.from(Uint32Array.from(patched).buffer));
    for (const t of patched) side.push(exact.subarray((l * tokens + t) * rowBytes, (l * tokens + t + 1) * rowBytes));
  }
  return { q, side: Buffer.concat(side) };
}
