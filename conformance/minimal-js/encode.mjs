// SPDX-License-Identifier: Apache-2.0
// A writer: a description and the bytes of its groups become an artifact. It holds one segment at a time. The data
// comes first, into a draft of its own, because the front holds its digests.
import { open, readFile } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import * as stored from './codecs/stored.mjs';
import * as zstd from './codecs/zstd.mjs';
import { describe } from './describe.mjs';
import { hash, hasher, hex, integerSum } from './digest.mjs';
import { publish, writeAll } from './drafts.mjs';
import { Failure, check } from './failure.mjs';
import { held, listCells } from './grid.mjs';
import { HEADER_BYTES, headerBytes } from './header.mjs';
import { canonical } from './json.mjs';
import { DTYPE_BYTES } from './manifest.mjs';
import { Statistics, numbers, quantise, setBytes } from './quantise.mjs';
import { align } from './semantics.mjs';
import { NO_LAYOUT, NO_SET, segmentRecordBytes, setRecordBytes } from './tables.mjs';

const CODECS = { stored, zstd };
const CHUNK_BYTES = 4 * 2 ** 20;

/** Write the artifact that the file `path` describes; returns its manifest and the digest of it. */
export async function encode(path, output, generator) {
  let spec;
  try {
    spec = JSON.parse(await readFile(path, 'utf8'));
  } catch (error) {
    throw new Failure('usage.argument', path, error.message);
  }
  const m = describe(spec, generator);
  const source = new Source(m, spec.groups.map(({ file }) => join(dirname(path), file)));
  try {
    return await publish(output, async (draft) => {
      await source.open();
      m.source_digest = await source.digest();
      m.content_id = hex(Buffer.from(canonical({ groups: m.groups, identity: m.identity, source_digest: m.source_digest })));
      return write(m, source, draft);
    });
  } finally {
    await source.close();
  }
}

/** The tensors, each a file [layer, token, head, dim] over what is held. */
class Source {
  #files = [];

  constructor(m, paths) {
    this.paths = paths;
    this.groups = m.groups.map((group) => {
      const [start, stop] = held(group, m.tokens.count);
      const headBytes = group.head_dim * DTYPE_BYTES[group.dtype];
      return { ...group, start, tokens: stop - start, headBytes, rowBytes: group.heads * headBytes };
    });
  }

  async open() {
    for (const [i, path] of this.paths.entries()) {
      const file = await open(path, 'r').catch((error) => {
        throw new Failure(error.code === 'ENOENT' ? 'io.not-found' : 'io.read', path, error.message);
      });
      this.#files.push(file);
      const { layers, tokens, rowBytes } = this.groups[i];
      const expected = layers.length * tokens * rowBytes;
      const { size } = await file.stat();
      check(size === expected, 'input.shape', path, `expected ${expected} bytes, found ${size}`);
    }
  }

  async #read(g, offset, length) {
    const out = Buffer.alloc(length);
    for (let have = 0; have < length;) {
      const { bytesRead } = await this.#files[g].read(out, have, length - have, offset + have);
      check(bytesRead > 0, 'io.short', this.paths[g], `ends after ${offset + have} bytes`);
      have += bytesRead;
    }
    return out;
  }

  /** The bytes of a cell, [layer, token, head, dim]. */
  async cell({ group: g, layerIndex, layerCount, tokenStart, tokenCount, headStart, headCount }) {
    const { start, tokens, headBytes, rowBytes } = this.groups[g];
    const parts = [];
    for (let layer = layerIndex; layer < layerIndex + layerCount; layer++) {
      const rows = await this.#read(g, (layer * tokens + tokenStart - start) * rowBytes, tokenCount * rowBytes);
      if (headCount * headBytes === rowBytes) { parts.push(rows); continue; }
      for (let at = headStart * headBytes; at < rows.length; at += rowBytes) parts.push(rows.subarray(at, at + headCount * headBytes));
    }
    return Buffer.concat(parts);
  }

  /** CID-1. */
  async digest() {
    const all = hasher();
    for (const [g, { layers, tokens, rowBytes }] of this.groups.entries()) {
      const layerBytes = tokens * rowBytes;
      for (let layer = 0; layer < layers.length; layer++) {
        const h = hasher();
        for (let at = 0; at < layerBytes; at += CHUNK_BYTES) {
          h.update(await this.#read(g, layer * layerBytes + at, Math.min(CHUNK_BYTES, layerBytes - at)));
        }
        all.update(h.digest());
      }
    }
    return Buffer.from(all.digest()).toString('hex');
  }

  async close() {
    for (const file of this.#files) await file.close();
  }
}

/** The data section in its draft: objects at multiples of the alignment (DAT-2); what is skipped reads as zeros. */
class Data {
  cursor = 0;

  constructor(file, alignment) {
    Object.assign(this, { file, alignment });
  }

  async append(bytes) {
    const offset = align(this.cursor, this.alignment);
    await writeAll(this.file, bytes, offset);
    this.cursor = offset + bytes.length;
    return { offset, bytes: bytes.length, digest: hash(bytes) };
  }
}

async function write(m, source, draft) {
  const cells = listCells(m);
  const data = new Data(await draft(), m.segmentation.alignment);
  const tables = [];
  const sets = new Map(); // quality name -> "group layerIndex" -> {index, scale, bias}
  for (const quality of m.qualities) {
    const { records, parameters } = await part(quality, data, () => writeSets(m, source, cells, quality, data));
    sets.set(quality.name, parameters);
    quality.sets = records.length;
    quality.set_table_digest = hex(Buffer.concat(records));
    tables.push(...records);
  }
  for (const track of m.tracks) {
    const records = await part(track, data, () => writeSegments(m, source, cells, track, sets.get(track.quality), data));
    track.segments = records.length;
    track.table_digest = hex(Buffer.concat(records));
    tables.push(...records);
  }
  m.data_bytes = data.cursor;
  const manifest = Buffer.from(canonical(m));
  const front = Buffer.concat([manifest, ...tables]);
  const dataAt = align(HEADER_BYTES + front.length, m.segmentation.alignment);
  const header = headerBytes({ fileBytes: dataAt + data.cursor, manifest, tablesBytes: front.length - manifest.length });
  const file = await draft();
  await writeAll(file, header, 0);
  await writeAll(file, front, header.length);
  await copy(data, file, dataAt);
  return { file, manifest: m, manifestDigest: hex(manifest) };
}

/** DAT-1 and DAT-3. */
async function part(of, data, run) {
  of.data_start = data.cursor;
  const result = await run();
  of.data_stop = data.cursor;
  return result;
}

/** One set for each layer run of a quantised group that has segments. */
async function writeSets(m, source, cells, quality, data) {
  const runs = new Map();
  for (const cell of cells) {
    if (quality.encodings[cell.group] !== 'quantised') continue;
    const key = `${cell.group} ${cell.layerIndex}`;
    if (!runs.has(key)) runs.set(key, []);
    if (cell.headStart === 0) runs.get(key).push(cell);
  }
  const ordered = [...runs.values()].sort(([a], [b]) => a.group - b.group || a.layerIndex - b.layerIndex); // REC-7
  const records = [];
  const parameters = new Map();
  for (const blocks of ordered) {
    const { group: g, layerIndex, layerCount } = blocks[0];
    const { heads: H, head_dim: D, dtype, name } = m.groups[g];
    const statistics = new Statistics(layerCount, H * D);
    for (const cell of blocks) statistics.add(numbers(await source.cell({ ...cell, headCount: H }), dtype, name));
    const set = statistics.parameters();
    parameters.set(`${g} ${layerIndex}`, { index: records.length, ...set });
    const object = await data.append(setBytes(set, layerCount, H, D));
    records.push(setRecordBytes({ ...object, group: g, layerIndex, layerCount }));
  }
  return { records, parameters };
}

async function writeSegments(m, source, cells, track, sets, data) {
  const records = [];
  for (const cell of cells) {
    const { heads: H, head_dim: D, dtype, name } = m.groups[cell.group];
    const bytes = await source.cell(cell);
    const set = sets.get(`${cell.group} ${cell.layerIndex}`);
    const width = cell.headCount * D;
    const { q, side } = set === undefined ? { q: bytes, side: Buffer.alloc(0) }
      : quantise(numbers(bytes, dtype, name), bytes, cell.layerCount, set, (l) => (l * H + cell.headStart) * D, width);
    const shape = {
      n: cell.layerCount, N: cell.tokenCount, heads: cell.headCount, D, element: set === undefined ? DTYPE_BYTES[dtype] : 1, order: null,
    };
    const payload = await CODECS[track.codecs[cell.group]].encode(q, shape, set === undefined);
    const object = await data.append(Buffer.concat([side, payload]));
    records.push(segmentRecordBytes({
      ...cell, ...object, sideBytes: side.length, setIndex: set?.index ?? NO_SET, layout: NO_LAYOUT, integerSum: integerSum(q),
      integerDigest: hash(q),
    }));
  }
  return records;
}

async function copy(data, file, position) {
  const chunk = Buffer.alloc(CHUNK_BYTES);
  for (let at = 0; at < data.cursor;) {
    const { bytesRead } = await data.file.read(chunk, 0, Math.min(CHUNK_BYTES, data.cursor - at), at);
    check(bytesRead > 0, 'io.short', 'draft', 'ends too early');
    await writeAll(file, chunk.subarray(0, bytesRead), position + at);
    at += bytesRead;
  }
}
