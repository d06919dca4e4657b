// SPDX-License-Identifier: Apache-2.0
// Section 10.3: rows, several tokens to a byte, in zstd frames. The frame's header and the sizes of its blocks are
// read here, before libzstd (as WebAssembly) sees any byte: the output is exactly as long as the record demands.
import { createRequire } from 'node:module';
import { Failure, check } from '../failure.mjs';

const zstd = createRequire(import.meta.url)('@bokuweb/zstd-wasm');
const PER_BYTE = [0, 8, 8, 5, 4, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]; // by radix; 256 has 1
const TILE_ROWS = 4096;
const TILE_BYTES = 64;
const LEVEL = 9;
const WINDOW_LIMIT = 8 * 2 ** 20;
let ready = null;

/** `shape`: {n, N, heads, D, element, bytes, order}; element is 1 for quantised groups, whose order may be null. */
export async function decode(payload, shape, where, exact) {
  await (ready ??= zstd.init());
  const must = (condition, detail) => check(condition, 'segment.payload', where, detail);
  const { N } = shape;
  const rows = shape.n * shape.D * shape.heads * shape.element;
  must(payload.length >= 4, 'no frame_count');
  const frames = payload.readUInt32LE(0);
  must(frames <= rows && payload.length >= 4 + 10 * frames, `${frames} entries do not fit (ZST-1)`);
  const out = Buffer.allocUnsafe(shape.bytes);
  let row = 0;
  let at = 4 + 10 * frames;
  for (let f = 0; f < frames; f++) {
    const entry = payload.subarray(4 + 10 * f, 14 + 10 * f);
    const count = entry.readUInt32LE(0);
    const length = entry.readUInt32LE(4);
    const low = entry[8];
    const radix = entry[9] + 1;
    must(count >= 1 && count <= rows - row, `frame ${f}: row_count ${count} (ZST-1)`);
    must((radix <= 16 || radix === 256) && low + radix <= 256, `frame ${f}: low ${low}, radix ${radix} (ZST-5)`);
    must(length <= payload.length - at, `frame ${f} ends after the payload (ZST-2)`);
    const p = PER_BYTE[radix] ?? 1;
    const perRow = Math.ceil(N / p);
    const frame = payload.subarray(at, at + length);
    checkFrame(frame, count * perRow, (detail) => new Failure('segment.payload', where, `frame ${f}: ${detail}`));
    let content;
    try {
      content = zstd.decompress(frame);
    } catch {
      throw new Failure('segment.payload', where, `frame ${f} does not decode (ZST-3)`);
    }
    must(content.length === count * perRow, `frame ${f} decodes to another size (ZST-4)`);
    // A tile of rows and bytes at a time: neighbouring rows share cache lines of the output.
    for (let first = 0; first < count; first += TILE_ROWS) {
      const places = Array.from({ length: Math.min(TILE_ROWS, count - first) }, (_, i) => place(shape, row + first + i, exact));
      for (let from = 0; from < perRow; from += TILE_BYTES) {
        const to = Math.min(from + TILE_BYTES, perRow);
        places.forEach(([base, stride], i) => {
          must(unpack(content, (first + i) * perRow, from, to, N, p, radix, low, out, base, stride),
            `frame ${f}: a byte or a digit out of range (ZST-6)`);
        });
      }
    }
    row += count;
    at += length;
  }
  must(row === rows, `${row} of ${rows} rows (ZST-1)`);
  must(at === payload.length, 'bytes after the last frame (ZST-2)');
  return out;
}

/** One frame per layer and byte, packed if it has few values. The arguments are those of `decode`; `order` is null. */
export async function encode(integers, shape, exact) {
  await (ready ??= zstd.init());
  const { N } = shape;
  const count = shape.D * shape.heads;
  const frames = shape.n * shape.element;
  const head = Buffer.alloc(4 + 10 * frames);
  head.writeUInt32LE(frames);
  const parts = [head];
  for (let f = 0; f < frames; f++) {
    const rows = Buffer.allocUnsafe(count * N);
    for (let i = 0; i < count; i++) {
      const [base, stride] = place(shape, f * count + i, exact);
      for (let t = 0; t < N; t++) rows[i * N + t] = integers[base + t * stride];
    }
    const { low, radix, content } = pack(rows, N);
    const frame = zstd.compress(content, LEVEL); // at this level windows have at most 4 MiB (ZST-3)
    head.writeUInt32LE(count, 4 + 10 * f);
    head.writeUInt32LE(frame.length, 8 + 10 * f);
    head[12 + 10 * f] = low;
    head[13 + 10 * f] = radix - 1;
    parts.push(frame);
  }
  return Buffer.concat(parts);
}

function pack(rows, N) {
  let [low, high] = [255, 0];
  for (const value of rows) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const radix = high - low + 1;
  if (radix > 16) return { low: 0, radix: 256, content: rows };
  const p = PER_BYTE[radix];
  const perRow = Math.ceil(N / p);
  const content = Buffer.alloc(rows.length / N * perRow);
  for (let at = 0, out = 0; at < rows.length; at += N, out += perRow) {
    for (let t = 0; t < N; t++) content[out + Math.floor(t / p)] += (rows[at + t] - low) * radix ** (t % p);
  }
  return { low, radix, content };
}

/** Where the tokens of a row go: offset of the first, and distance. */
function place({ n, N, heads, D, element, order }, row, exact) {
  const head = row % heads;
  const stride = heads * D * element;
  if (exact) { // [layer, byte, dim, head]
    const dim = Math.floor(row / heads) % D;
    const byte = Math.floor(row / (heads * D)) % element;
    const layer = Math.floor(row / stride);
    return [layer * N * stride + (head * D + dim) * element + byte, stride];
  }
  const rank = Math.floor(row / heads) % D; // [layer, rank, head]
  const layer = Math.floor(row / stride);
  const dim = order === null ? rank : order[(layer * heads + head) * D + rank];
  return [layer * N * stride + head * D + dim, stride];
}

/** Digits of bytes [from, to) of the row at `rowAt` to their places; false if a byte or a digit behind the last token is out of range. */
function unpack(content, rowAt, from, to, N, p, radix, low, out, at, stride) {
  for (let i = from, t = from * p; i < to; i++) {
    let rest = content[rowAt + i];
    for (let k = 0; k < p; k++, t++) {
      const digit = p === 1 ? rest : rest % radix;
      rest = p === 1 ? 0 : (rest - digit) / radix;
      if (t < N) out[at + t * stride] = low + digit;
      else if (digit !== 0) return false;
    }
    if (rest !== 0) return false;
  }
  return true;
}

/** ZST-3 and ZST-4 on the frame header, and that the frame is all there is: RFC 8878, sections 3.1.1.1 and 3.1.1.2. */
function checkFrame(frame, expected, bad) {
  if (frame.length < 6 || frame.readUInt32LE(0) !== 0xfd2fb528) throw bad('no zstd frame (ZST-3)');
  const descriptor = frame[4];
  if (descriptor & 0x1f) throw bad('dictionary, checksum, unused or reserved bits (ZST-3)');
  const single = (descriptor & 0x20) !== 0;
  const sizeBytes = [single ? 1 : 0, 2, 4, 8][descriptor >> 6];
  if (sizeBytes === 0) throw bad('no content size (ZST-3)');
  let at = single ? 5 : 6;
  if (frame.length < at + sizeBytes) throw bad('ends in its header');
  const size = sizeBytes === 8 ? Number(frame.readBigUInt64LE(at)) : frame.readUIntLE(at, sizeBytes) + (sizeBytes === 2 ? 256 : 0);
  const base = 2 ** (10 + (frame[5] >> 3));
  const window = single ? size : base + (base / 8) * (frame[5] & 7);
  if (window > WINDOW_LIMIT) throw bad(`window of ${window} bytes (ZST-3)`);
  if (size !== expected) throw bad(`expected a content of ${expected} bytes, found ${size} (ZST-4)`);
  at += sizeBytes;
  for (let lastBlock = false; !lastBlock;) {
    if (frame.length < at + 3) throw bad('ends in its blocks');
    const block = frame.readUIntLE(at, 3);
    lastBlock = (block & 1) === 1;
    at += 3 + (((block >> 1) & 3) === 1 ? 1 : block >> 3); // an RLE block stores one byte
  }
  if (at !== frame.length) throw bad('its blocks end elsewhere (ZST-2, ZST-3)');
}
