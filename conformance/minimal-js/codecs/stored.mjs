// SPDX-License-Identifier: Apache-2.0
// Section 10.2: the payload is the integers.
import { check } from '../failure.mjs';

export function decode(payload, shape, where) {
  check(payload.length === shape.bytes, 'segment.payload', where,
    `expected ${shape.bytes} bytes, found ${payload.length} (STO-1)`);
  return payload;
}

export const encode = (integers) => integers;
