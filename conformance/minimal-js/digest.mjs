// SPDX-License-Identifier: Apache-2.0
import { blake3 } from '@noble/hashes/blake3';

export const hash = (bytes) => Buffer.from(blake3(bytes));
export const hex = (bytes) => hash(bytes).toString('hex');
export const hasher = () => blake3.create({});
// The library slices a key and wipes the slice; of a Buffer that would be a view, hence a plain copy.
export const keyed = (key, bytes) => Buffer.from(blake3(bytes, { key: Uint8Array.from(key) }));
export const deriveKey = (context, bytes) => Buffer.from(blake3(bytes, { context }));
