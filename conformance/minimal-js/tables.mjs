// SPDX-License-Identifier: Apache-2.0
// Set tables and segment tables: sections 8.1, 8.2 and 8.4. Records are read from the bytes when they are needed.
import { Failure, check } from './failure.mjs';
import { uint64 } from './header.mjs';
import { align } from './semantics.mjs';

export const SET_RECORD = 64;
export const SEGMENT_RECORD = 128;
export const NO_SET = 0xffffffff;
export const NO_LAYOUT = 0xffff;
const SIDE_LIMIT = 268_435_456;
const STORED_LIMIT = 536_870_912;

export function setRecord(table, n) {
  const at = n * SET_RECORD;
  return {
    offset: uint64(table, at, `set ${n}`),
    bytes: uint64(table, at + 8, `set ${n}`),
    digest: table.subarray(at + 16, at + 48),
    group: table.readUInt16LE(at + 48),
    layerIndex: table.readUInt16LE(at + 50),
    layerCount: table.readUInt16LE(at + 52),
    reserved: table.subarray(at + 54, at + 64),
  };
}

export function segmentRecord(table, n) {
  const at = n * SEGMENT_RECORD;
  return {
    offset: uint64(table, at, `segment ${n}`),
    bytes: uint64(table, at + 8, `segment ${n}`),
    sideBytes: table.readUInt32LE(at + 16),
    setIndex: table.readUInt32LE(at + 20),
    tokenStart: uint64(table, at + 24, `segment ${n}`),
    tokenCount: table.readUInt32LE(at + 32),
    group: table.readUInt16LE(at + 36),
    layerIndex: table.readUInt16LE(at + 38),
    layerCount: table.readUInt16LE(at + 40),
    layout: table.readUInt16LE(at + 42),
    headStart: table.readUInt32LE(at + 44),
    headCount: table.readUInt32LE(at + 48),
    reserved: table.subarray(at + 52, at + 56),
    integerSum: table.readBigUInt64LE(at + 56),
    digest: table.subarray(at + 64, at + 96),
    integerDigest: table.subarray(at + 96, at + 128),
  };
}

export function setRecordBytes({ offset, bytes, digest, group, layerIndex, layerCount }) {
  const out = Buffer.alloc(SET_RECORD);
  [offset, bytes].forEach((n, i) => out.writeBigUInt64LE(BigInt(n), 8 * i));
  digest.copy(out, 16);
  [group, layerIndex, layerCount].forEach((n, i) => out.writeUInt16LE(n, 48 + 2 * i));
  return out;
}

export function segmentRecordBytes(record) {
  const out = Buffer.alloc(SEGMENT_RECORD);
  [record.offset, record.bytes].forEach((n, i) => out.writeBigUInt64LE(BigInt(n), 8 * i));
  [record.sideBytes, record.setIndex].forEach((n, i) => out.writeUInt32LE(n, 16 + 4 * i));
  out.writeBigUInt64LE(BigInt(record.tokenStart), 24);
  out.writeUInt32LE(record.tokenCount, 32);
  [record.group, record.layerIndex, record.layerCount, record.layout].forEach((n, i) => out.writeUInt16LE(n, 36 + 2 * i));
  [record.headStart, record.headCount].forEach((n, i) => out.writeUInt32LE(n, 44 + 4 * i));
  out.writeBigUInt64LE(record.integerSum, 56);
  record.digest.copy(out, 64);
  record.integerDigest.copy(out, 96);
  return out;
}

const zeros = (bytes) => bytes.every((b) => b === 0);
const sameRun = (a, b) => a.group === b.group && a.layerIndex === b.layerIndex && a.layerCount === b.layerCount;

/** Each object of a part stands at the aligned cursor, and the last one ends at data_stop (DAT-2, DAT-3). */
function walk(part, alignment) {
  let cursor = part.data_start;
  return {
    next(record, where) {
      check(record.offset === align(cursor, alignment), 'table.record', where,
        `expected offset ${align(cursor, alignment)}, found ${record.offset} (DAT-2)`);
      check(record.bytes <= part.data_stop - record.offset, 'table.record', where, 'reaches beyond data_stop (DAT-3)');
      cursor = record.offset + record.bytes;
    },
    end() {
      check(cursor === part.data_stop, 'table.record', part.name, `ends at ${cursor}, not at data_stop (DAT-3)`);
    },
  };
}

export function checkSetTable(m, quality, table) {
  const cursor = walk(quality, m.segmentation.alignment);
  let before = { group: 0, layerIndex: 0 };
  for (let n = 0; n < quality.sets; n++) {
    const record = setRecord(table, n);
    const where = `${quality.name}/set/${n}`;
    const must = (condition, detail) => check(condition, 'table.record', where, detail);
    must(zeros(record.reserved), 'reserved bytes (TAB-4)');
    must((quality.encodings[record.group] ?? 'exact') !== 'exact', 'no quantised group (REC-5)');
    const group = m.groups[record.group];
    const cut = m.segmentation.groups[record.group].layers;
    must(record.layerIndex % cut === 0 && record.layerIndex < group.layers.length
      && record.layerCount === Math.min(cut, group.layers.length - record.layerIndex), 'no layer run (REC-5)');
    must(record.group > before.group || (record.group === before.group && record.layerIndex >= before.layerIndex),
      'descends (REC-7)');
    before = record;
    must(record.bytes >= 16, 'fewer than 16 bytes (REC-4)');
    must(record.bytes <= 16 + 12 * record.layerCount * group.heads * group.head_dim + 1024, 'too long (REC-9)');
    cursor.next(record, where);
  }
  cursor.end();
}

export function checkSegmentTable(m, track, table, setTable, cells) {
  const quality = m.qualities.find((q) => q.name === track.quality);
  const cursor = walk(track, m.segmentation.alignment);
  const setsUsed = new Uint8Array(quality.sets);
  const layoutsUsed = new Uint8Array(track.layouts.length);
  for (let n = 0; n < track.segments; n++) {
    const record = segmentRecord(table, n);
    const where = `${track.name}/segment/${n}`;
    const must = (condition, detail) => check(condition, 'table.record', where, detail);
    must(zeros(record.reserved), 'reserved bytes (TAB-4)');
    for (const key of ['group', 'layerIndex', 'layerCount', 'headStart', 'headCount', 'tokenStart', 'tokenCount']) {
      must(record[key] === cells[n][key], `${key}: expected ${cells[n][key]}, found ${record[key]} (REC-1)`);
    }
    check(record.sideBytes <= SIDE_LIMIT, 'limit.exceeded', where, `side_bytes above ${SIDE_LIMIT}`);
    check(record.bytes <= STORED_LIMIT, 'limit.exceeded', where, `stored_bytes above ${STORED_LIMIT}`);
    must(record.bytes > record.sideBytes, 'no payload (REC-4)');
    if (quality.encodings[record.group] === 'exact') {
      must(record.setIndex === NO_SET && record.sideBytes === 0, 'REC-3');
    } else {
      must(record.setIndex < quality.sets && sameRun(record, setRecord(setTable, record.setIndex)),
        'names no set of its layer run (REC-2)');
      setsUsed[record.setIndex] = 1;
    }
    if (track.codecs[record.group] === 'hevc') {
      must(record.layout < track.layouts.length, 'no such layout (REC-8)');
      layoutsUsed[record.layout] = 1;
      const { tile, fold, grid, frames } = track.layouts[record.layout];
      must(tile[0] * tile[1] >= record.headCount * m.groups[record.group].head_dim
        && fold[0] * fold[1] * grid[0] * grid[1] * frames >= record.tokenCount, 'layout too small (LAY-2)');
    } else {
      must(record.layout === NO_LAYOUT, 'a layout without hevc (REC-8)');
    }
    cursor.next(record, where);
  }
  cursor.end();
  check(setsUsed.every((u) => u === 1), 'table.record', track.name, 'a set is named by no segment (REC-7)');
  check(layoutsUsed.every((u) => u === 1), 'table.record', track.name, 'a layout is used by no segment (TRK-6)');
}

/** Two tracks against each other: REC-6 within one quality, REC-10 for exact groups of different ones. */
export function compareTracks(m, first, firstTable, second, secondTable) {
  const [a, b] = [first, second].map((t) => m.qualities.find((q) => q.name === t.quality));
  for (let n = 0; n < second.segments; n++) {
    const x = segmentRecord(firstTable, n);
    const y = segmentRecord(secondTable, n);
    const exact = a.encodings[x.group] === 'exact' && b.encodings[x.group] === 'exact';
    if (a !== b && !exact) continue;
    if (a === b && (x.setIndex !== y.setIndex || x.sideBytes !== y.sideBytes)) {
      throw new Failure('table.record', `${second.name}/segment/${n}`, `differs from ${first.name} (REC-6)`);
    }
    check(x.integerDigest.equals(y.integerDigest), 'table.record', `${second.name}/segment/${n}`,
      `other integers than in ${first.name} (REC-6, REC-10)`);
  }
}
