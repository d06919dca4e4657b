// SPDX-License-Identifier: Apache-2.0
// An open artifact: the steps of ORD-1, then tables, sets and segments, each checked in the order of ORD-3.
import { hash, integerSum } from './digest.mjs';
import { Failure, check } from './failure.mjs';
import { listCells } from './grid.mjs';
import { HEADER_BYTES, parseHeader } from './header.mjs';
import { canonical, parse } from './json.mjs';
import { DTYPE_BYTES, checkManifest } from './manifest.mjs';
import { restore } from './quant.mjs';
import { align, checkSemantics } from './semantics.mjs';
import { checkPatches, parseSet, parseSide, segmentParameters } from './sets.mjs';
import { FIRST_BYTES, openSource } from './source.mjs';
import { NO_SET, SEGMENT_RECORD, SET_RECORD, checkSegmentTable, checkSetTable, segmentRecord, setRecord } from './tables.mjs';
import * as hevc from './codecs/hevc.mjs';
import * as stored from './codecs/stored.mjs';
import * as zstd from './codecs/zstd.mjs';

const CODECS = { stored, zstd, hevc };
const SET_CACHE_BYTES = 64 * 2 ** 20;
const TIMEOUT_SECONDS = 60;

export async function openArtifact(url, timeoutSeconds = TIMEOUT_SECONDS) {
  const source = await openSource(url, timeoutSeconds);
  try {
    const open = source.endsUnknown;
    const header = parseHeader(source.head, source.size, open ? 'io.short' : 'file.size');
    check(!open || source.head.length >= header.fileBytes, 'io.short', url, 'the first reply does not reach the end (REQ-3)');
    check(!open || source.head.length === header.fileBytes, 'file.size', url, `expected ${header.fileBytes} bytes, found more`);
    await source.prefetch(HEADER_BYTES + header.manifestBytes + header.tablesBytes);
    const bytes = await source.read(HEADER_BYTES, header.manifestBytes);
    check(hash(bytes).equals(header.manifestDigest), 'manifest.digest', 'manifest', 'the header names another manifest');
    const manifest = parse(bytes);
    check(Buffer.from(canonical(manifest)).equals(bytes), 'manifest.canonical', 'manifest', 'not in canonical form (JSN-7)');
    checkManifest(manifest);
    checkSemantics(manifest, header);
    const artifact = new Artifact(source, header, manifest);
    await artifact.checkZeros(artifact.tablesAt + header.tablesBytes, Math.min(artifact.dataAt, FIRST_BYTES)); // HDR-9
    return artifact;
  } catch (error) {
    await source.close();
    throw error;
  }
}

class Artifact {
  #tables = new Map(); // the last few tables, checked
  #sets = new Map(); // quantisation sets, checked, up to SET_CACHE_BYTES
  #setBytes = 0;
  #cells = null;

  constructor(source, header, manifest) {
    Object.assign(this, { source, header, manifest });
    this.tablesAt = HEADER_BYTES + header.manifestBytes;
    this.dataAt = align(this.tablesAt + header.tablesBytes, manifest.segmentation.alignment);
  }

  quality(track) {
    return this.manifest.qualities.find((q) => q.name === track.quality);
  }

  readData(offset, length) {
    return this.source.read(this.dataAt + offset, length);
  }

  /** Padding, from and to offsets in the file. */
  async checkZeros(start, stop) {
    if (start >= stop) return;
    const bytes = await this.source.read(start, stop - start);
    check(bytes.every((b) => b === 0), 'data.padding', `byte ${start}`, 'expected zeros (HDR-9, DAT-5)');
  }

  /** Announce that these segments will be read in this order, and read their sets at once: few requests are left then. */
  async prepare(track, numbers) {
    const table = await this.table(track);
    const quality = this.quality(track);
    const setTable = await this.table(quality);
    const used = new Set();
    for (const n of numbers) used.add(segmentRecord(table, n).setIndex);
    used.delete(NO_SET);
    const sets = [...used].sort((a, b) => a - b);
    const range = ({ offset, bytes }) => [this.dataAt + offset, this.dataAt + offset + bytes];
    const fits = sets.reduce((sum, n) => sum + setRecord(setTable, n).bytes, 0) <= SET_CACHE_BYTES;
    await this.source.plan((async function* () {
      if (fits) for (const n of sets) yield range(setRecord(setTable, n));
      for (const n of numbers) yield range(segmentRecord(table, n));
    })(), this.manifest.segmentation.alignment);
    if (fits) for (const n of sets) await this.set(quality, n);
  }

  /** The set table of a quality or the segment table of a track, checked. */
  async table(part) {
    if (this.#tables.has(part)) return this.#tables.get(part);
    const { qualities, tracks } = this.manifest;
    let at = this.tablesAt;
    for (const before of [...qualities, ...tracks]) {
      if (before === part) break;
      at += before.sets === undefined ? SEGMENT_RECORD * before.segments : SET_RECORD * before.sets;
    }
    const isTrack = part.sets === undefined;
    const bytes = await this.source.read(at, isTrack ? SEGMENT_RECORD * part.segments : SET_RECORD * part.sets);
    const digest = isTrack ? part.table_digest : part.set_table_digest;
    check(hash(bytes).toString('hex') === digest, 'table.digest', part.name, 'the manifest names another table (TAB-3)');
    if (isTrack) {
      this.#cells ??= listCells(this.manifest);
      checkSegmentTable(this.manifest, part, bytes, await this.table(this.quality(part)), this.#cells);
    } else {
      checkSetTable(this.manifest, part, bytes);
    }
    if (this.#tables.size >= 4) this.#tables.delete(this.#tables.keys().next().value);
    this.#tables.set(part, bytes);
    return bytes;
  }

  async set(quality, index) {
    const where = `${quality.name}/set/${index}`;
    if (this.#sets.has(where)) return this.#sets.get(where);
    const record = setRecord(await this.table(quality), index);
    const bytes = await this.readData(record.offset, record.bytes);
    check(hash(bytes).equals(record.digest), 'set.digest', where, 'the record names other bytes');
    const value = parseSet(bytes, record, this.manifest.groups[record.group], where);
    if (this.#setBytes + bytes.length > SET_CACHE_BYTES) {
      this.#sets.clear();
      this.#setBytes = 0;
    }
    this.#sets.set(where, value);
    this.#setBytes += bytes.length;
    return value;
  }

  /**
   * Check and decode one segment. With `verify` also the integers' digest and sum, filler and patches, for which
   * nothing need be restored: the integers come back. Otherwise the restored bytes [layer, token, head, dim] do.
   */
  async segment(track, n, verify) {
    const record = segmentRecord(await this.table(track), n);
    const where = `${track.name}/segment/${n}`;
    const group = this.manifest.groups[record.group];
    const quality = this.quality(track);
    const exact = quality.encodings[record.group] === 'exact';
    const set = exact ? null : await this.set(quality, record.setIndex);

    const bytes = await this.readData(record.offset, record.bytes);
    check(hash(bytes).equals(record.digest), 'segment.digest', where, 'the record names other bytes');
    const elementBytes = DTYPE_BYTES[group.dtype];
    const parameters = exact ? null : segmentParameters(set, record);
    const side = exact ? null : parseSide(bytes.subarray(0, record.sideBytes), record,
      record.headCount * group.head_dim * elementBytes, set.tokenScale.length, where);

    const element = exact ? elementBytes : 1;
    const shape = {
      n: record.layerCount, N: record.tokenCount, heads: record.headCount, D: group.head_dim, element,
      bytes: record.layerCount * record.tokenCount * record.headCount * group.head_dim * element,
      order: parameters?.order ?? null, layout: track.layouts[record.layout],
    };
    const payload = bytes.subarray(record.sideBytes);
    const codec = track.codecs[record.group];
    if (codec === 'hevc' && !hevc.available()) throw new Failure('codec.unavailable', where, 'no ffmpeg that decodes HEVC');
    const q = await CODECS[codec].decode(payload, shape, where, codec === 'hevc' ? verify : exact);
    if (verify) {
      check(hash(q).equals(record.integerDigest), 'segment.integers', where, 'the record names other integers');
      check(integerSum(q) === record.integerSum, 'segment.integers', where, 'the record states another sum of the integers (INT-4)');
    }
    if (!exact) checkPatches(side, q, parameters, record, group.head_dim, group.dtype, verify, where);
    if (verify) return { q, record, bytes };
    return { restored: exact ? q : restore(q, record, group.head_dim, group.dtype, parameters, side), record };
  }

  close() {
    return this.source.close();
  }
}
