// SPDX-License-Identifier: Apache-2.0
import { blake3 } from '@noble/hashes/blake3';

export const hash = (bytes) => Buffer.from(blake3(bytes));
export const hex = (bytes) => hash(bytes).toString('hex');
export const hasher = () => blake3.create({});
// The library slices a key and wipes the slice; of a Buffer that would be a view, hence a plain copy.
export const keyed = (key, bytes) => Buffer.from(blake3(bytes, { key: Uint8Array.from(key) }));
export const deriveKey = (context, bytes) => Buffer.from(blake3(bytes, { context }));

const ROW = 4096;

/** h(n) of INT-3, an odd number below 2^32. */
export function sumWeight(n) {
  const z = Math.imul(2_654_435_761, n) >>> 0;
  return ((z ^ (z >>> 15)) | 1) >>> 0;
}

const COLUMNS = Float64Array.from({ length: ROW }, (_, i) => sumWeight(i));

/** The sum of INT-3 over integers of one byte each, a BigInt below 2^64. */
export function integerSum(q) {
  let sum = 0n;
  for (let start = 0, row = 0; start < q.length; start += ROW, row++) {
    const count = Math.min(ROW, q.length - start);
    let part = 0; // below 2^52, so exact
    for (let i = 0; i < count; i++) part += q[start + i] * COLUMNS[i];
    sum += BigInt(part) * BigInt(sumWeight(ROW + row));
  }
  return BigInt.asUintN(64, sum);
}
