// SPDX-License-Identifier: Apache-2.0
// Quantisation sets (section 9.2) and side blocks (section 9.3).
import { Failure, check } from './failure.mjs';

/** The numbers of a little-endian array at any offset: copied, so that it is aligned. */
export const array = (Type, bytes, at, count) =>
  new Type(Uint8Array.prototype.slice.call(bytes, at, at + count * Type.BYTES_PER_ELEMENT).buffer);

const inScaleRange = (x) => x >= 2 ** -40 && x <= 2 ** 40;
export const inBiasRange = (x) => Object.is(x, 0) || (Math.abs(x) >= 2 ** -64 && Math.abs(x) <= 2 ** 96);

export function parseSet(bytes, record, group, transformed, where) {
  const must = (condition, detail) => check(condition, 'set.content', where, detail);
  const [n, H, D] = [record.layerCount, group.heads, group.head_dim];
  must(bytes.readUInt16LE(0) === n && bytes.readUInt32LE(4) === H && bytes.readUInt32LE(8) === D,
    'layer_count, heads or head_dim of another set (SET-1)');
  const flags = bytes.readUInt16LE(2);
  must(flags < 16 && bytes.readUInt16LE(14) === 0, 'unknown flag or reserved field (SET-2)');
  must(!transformed || flags === 0, 'flags in the set of a transformed group (TRF-3)');
  const scales = bytes.readUInt16LE(12);
  check(scales <= 256, 'limit.exceeded', where, 'more than 256 token scales (SET-7)');

  const channels = n * H * D;
  const plan = [
    ['scale', Float32Array, flags & 1 ? channels : n],
    ['zero', Int16Array, flags & 2 ? channels : n],
    ['bias', Float32Array, flags & 4 ? channels : 0],
    ['order', D <= 256 ? Uint8Array : Uint16Array, flags & 8 ? channels : 0],
    ['tokenScale', Float32Array, scales],
  ];
  const length = plan.reduce((sum, [, Type, count]) => sum + count * Type.BYTES_PER_ELEMENT, 16);
  must(bytes.length === length, `expected ${length} bytes, found ${bytes.length} (SET-3)`);
  const set = { n, H, D };
  let at = 16;
  for (const [name, Type, count] of plan) {
    set[name] = array(Type, bytes, at, count);
    at += count * Type.BYTES_PER_ELEMENT;
  }
  must(set.scale.every(inScaleRange) && set.tokenScale.every(inScaleRange), 'scale out of range (SET-4)');
  must(set.bias.every(inBiasRange), 'bias out of range (SET-5)');
  must(!transformed || set.zero.every((zero) => zero === 128), 'a zero of a transformed group is not 128 (TRF-3)');
  for (let at = 0; at < set.order.length; at += D) {
    const seen = new Uint8Array(D);
    for (const dim of set.order.subarray(at, at + D)) {
      must(dim < D && !seen[dim], 'order is no permutation (SET-6)');
      seen[dim] = 1;
    }
  }
  return set;
}

/**
 * The parameters of a segment's heads, spread to one value per channel [layer, head, dim]. Arrays that the set
 * does not hold are null.
 */
export function segmentParameters(set, segment) {
  const { n, H, D } = set;
  const width = segment.headCount * D;
  const spread = (values) => {
    if (values.length === 0) return null;
    const out = new values.constructor(n * width);
    for (let l = 0; l < n; l++) {
      const at = (l * H + segment.headStart) * D;
      if (values.length === n && n * H * D !== n) out.fill(values[l], l * width, (l + 1) * width);
      else out.set(values.subarray(at, at + width), l * width);
    }
    return out;
  };
  return {
    scale: spread(set.scale), zero: spread(set.zero), bias: spread(set.bias), order: spread(set.order),
    tokenScale: set.tokenScale,
  };
}

const isFinite = {
  float32: (row) => array(Uint32Array, row, 0, row.length / 4).every((b) => (b & 0x7f800000) !== 0x7f800000),
  float16: (row) => array(Uint16Array, row, 0, row.length / 2).every((b) => (b & 0x7c00) !== 0x7c00),
  bfloat16: (row) => array(Uint16Array, row, 0, row.length / 2).every((b) => (b & 0x7f80) !== 0x7f80),
  float8_e4m3fn: (row) => row.every((b) => (b & 0x7f) !== 0x7f), // has NaN, but no infinity
  float8_e5m2: (row) => row.every((b) => (b & 0x7c) !== 0x7c),
};

/** Parse a side block into token scale indices [layer, token] and patches {layer, token, row}. */
export function parseSide(bytes, segment, rowBytes, tokenScales, where) {
  const { layerCount: n, tokenCount: N } = segment;
  const must = (condition, detail) => check(condition, 'segment.side', where, detail);
  let at = 0;
  const take = (count) => {
    must(count <= bytes.length - at, 'ends too early (SID-1)');
    at += count;
    return bytes.subarray(at - count, at);
  };
  const index = tokenScales > 0 ? take(n * N) : null;
  must(index === null || index.every((i) => i < tokenScales), 'token scale index too large (SID-2)');
  const patches = [];
  for (let layer = 0; layer < n; layer++) {
    const count = take(4).readUInt32LE(0);
    must(count <= N, `${count} patches for ${N} tokens (SID-3)`);
    const tokens = take(4 * count);
    const rows = take(count * rowBytes);
    let before = -1;
    for (let i = 0; i < count; i++) {
      const token = tokens.readUInt32LE(4 * i);
      must(token > before && token < N, 'patched tokens must ascend below N (SID-3)');
      must(index === null || index[layer * N + token] === 0, 'a patched token has a scale index (SID-4)');
      patches.push({ layer, token, row: rows.subarray(i * rowBytes, (i + 1) * rowBytes) });
      before = token;
    }
  }
  must(at === bytes.length, 'goes on after its end (SID-1)');
  return { index, patches };
}

/** SID-4, which needs the integers, and SID-5, which only verification must check (VER-6). */
export function checkPatches(side, q, parameters, segment, D, dtype, finite, where) {
  const width = segment.headCount * D;
  for (const { layer, token, row } of side.patches) {
    const at = (layer * segment.tokenCount + token) * width;
    for (let c = 0; c < width; c++) {
      const filler = Math.min(Math.max(parameters.zero[layer * width + c], 0), 255);
      if (q[at + c] !== filler) throw new Failure('segment.side', where, `integers of patched token ${token} (SID-4)`);
    }
    if (finite) check(isFinite[dtype](row), 'segment.side', where, `NaN or infinity in a patch of token ${token} (SID-5)`);
  }
}
