// SPDX-License-Identifier: Apache-2.0
// An open artifact: the steps of ORD-1, then tables, sets and segments, each checked in the order of ORD-3.
import { hash, integerSum } from './digest.mjs';
import { Failure, check } from './failure.mjs';
import { listCells } from './grid.mjs';
import { HEADER_BYTES, parseHeader } from './header.mjs';
import { canonical, parse } from './json.mjs';
import { DTYPE_BYTES, checkManifest } from './manifest.mjs';
import { openProfile } from './profile.mjs';
import { restore, restoreTransformed } from './quant.mjs';
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

/** `profile` is the path or URL of the calibration profile that the caller gives, if any. */
export async function openArtifact(url, timeoutSeconds = TIMEOUT_SECONDS, profile = null) {
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
    const artifact = new Artifact(source, header, manifest, () => openProfileOf(manifest, profile, timeoutSeconds));
    await artifact.checkZeros(artifact.tablesAt + header.tablesBytes, Math.min(artifact.dataAt, FIRST_BYTES)); // HDR-9
    return artifact;
  } catch (error) {
    await source.close();
    throw error;
  }
}

/** TRF-4. */
function openProfileOf(m, url, timeoutSeconds) {
  check(url !== null, 'profile.missing', '/profile/digest', `needs the calibration profile ${m.profile.digest}, and none is given`);
  return openProfile(url, m.profile.digest, timeoutSeconds);
}

class Artifact {
  #tables = new Map(); // the last few tables, checked
  #sets = new Map(); // quantisation sets, checked, up to SET_CACHE_BYTES
  #setBytes = 0;
  #cells = null;
  #profile = null; // once a transformed group is to be restored

  constructor(source, header, manifest, openProfileHere) {
    Object.assign(this, { source, header, manifest, openProfileHere });
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
    await this.#prepareProfile(quality, new Set(numbers.map((n) => segmentRecord(table, n).group)));
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

  async #prepareProfile(quality, groups) {
    const transformed = [...groups].filter((g) => quality.encodings[g] === 'transformed');
    if (transformed.length === 0) return;
    this.#profile ??= await this.openProfileHere();
    this.#profile.checkFits(this.manifest.identity, quality.name, transformed.map((g) => this.manifest.groups[g]));
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
    const transformed = quality.encodings[record.group] === 'transformed';
    const value = parseSet(bytes, record, this.manifest.groups[record.group], transformed, where);
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
    if (exact) return { restored: q, record };
    if (quality.encodings[record.group] === 'quantised') {
      return { restored: restore(q, record, group.head_dim, group.dtype, parameters, side), record };
    }
    const layers = group.layers.slice(record.layerIndex, record.layerIndex + record.layerCount);
    const transforms = [];
    for (const layer of layers) transforms.push(await this.#profile.transform(quality.name, group.role, layer));
    return { restored: restoreTransformed(q, record, group, this.manifest.tokens.first_position, set, side, transforms), record };
  }

  async close() {
    await this.#profile?.close();
    await this.source.close();
  }
}
