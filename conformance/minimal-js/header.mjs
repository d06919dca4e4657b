// SPDX-License-Identifier: Apache-2.0
// The header of 128 bytes: section 4.1, steps 1 to 6 of ORD-1.
import { hash } from './digest.mjs';
import { check } from './failure.mjs';

const MAGIC = Buffer.from('894b56460d0a1a0a', 'hex');
export const PROFILE_MAGIC = Buffer.from('894b56500d0a1a0a', 'hex'); // section 9.6
export const HEADER_BYTES = 128;
const MANIFEST_LIMIT = 16_777_216;

/** An unsigned 64-bit integer; above 2^53 - 1 it is over the limit `integer` (CNV-2). */
export function uint64(bytes, at, where) {
  const high = bytes.readUInt32LE(at + 4);
  check(high < 2 ** 21, 'limit.exceeded', where, 'integer above 2^53 - 1');
  return high * 2 ** 32 + bytes.readUInt32LE(at);
}

/** `head` is what the first request brought, `size` the size of the artifact or null if unknown; `tooShort` the code if it ends. */
export function parseHeader(head, size, tooShort = 'file.size', magic = MAGIC) {
  check(head.length >= 8 && magic.equals(head.subarray(0, 8)), 'header.magic', 'header', 'not a kvformat file');
  check(head.length >= 48, tooShort, 'header', `the file ends after ${head.length} bytes, inside the header`);
  const headerBytes = head.readUInt32LE(12);
  check(headerBytes >= 128 && headerBytes <= 4096, 'header.field', 'header/header_bytes', `found ${headerBytes}`);
  check(head.length >= headerBytes, tooShort, 'header', `the file ends after ${head.length} bytes, inside the header`);
  const checked = hash(Buffer.concat([head.subarray(0, 16), head.subarray(48, headerBytes)]));
  check(checked.equals(head.subarray(16, 48)), 'header.check', 'header/check', 'the header does not have this digest');
  const version = `${head.readUInt16LE(8)}.${head.readUInt16LE(10)}`;
  check(version === '0.9', 'version.unknown', 'header/version', `expected 0.9, found ${version}`);

  check(headerBytes === HEADER_BYTES, 'header.field', 'header/header_bytes', `expected 128, found ${headerBytes}`);
  const fileBytes = uint64(head, 48, 'header/file_bytes');
  const manifestBytes = uint64(head, 56, 'header/manifest_bytes');
  const tablesBytes = uint64(head, 64, 'header/tables_bytes');
  check(manifestBytes <= MANIFEST_LIMIT, 'limit.exceeded', 'header/manifest_bytes', `found ${manifestBytes}`);
  check(head.subarray(104, 128).every((b) => b === 0), 'header.field', 'header/reserved', 'expected zeros');
  // Differences instead of sums: they stay exact (CNV-3).
  check(tablesBytes <= fileBytes - HEADER_BYTES - manifestBytes, 'header.field', 'header/file_bytes',
    'header, manifest and tables do not fit (HDR-12)');
  check(size === null || size === fileBytes, 'file.size', 'file', `expected ${fileBytes} bytes, found ${size}`);
  return { fileBytes, manifestBytes, tablesBytes, manifestDigest: head.subarray(72, 104) };
}

/** The header of an artifact with this front. */
export function headerBytes({ fileBytes, manifest, tablesBytes }) {
  const head = Buffer.alloc(HEADER_BYTES);
  MAGIC.copy(head);
  head.writeUInt16LE(9, 10);
  head.writeUInt32LE(HEADER_BYTES, 12);
  [fileBytes, manifest.length, tablesBytes].forEach((n, i) => head.writeBigUInt64LE(BigInt(n), 48 + 8 * i));
  hash(manifest).copy(head, 72);
  hash(Buffer.concat([head.subarray(0, 16), head.subarray(48)])).copy(head, 16);
  return head;
}
