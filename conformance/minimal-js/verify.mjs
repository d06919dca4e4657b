// SPDX-License-Identifier: Apache-2.0
// Verification of a whole artifact: section 11.3.
import { hash, hasher } from './digest.mjs';
import { Failure, check } from './failure.mjs';
import { DTYPE_BYTES } from './manifest.mjs';
import { compareTracks, segmentRecord, setRecord } from './tables.mjs';

const SLICE = 268_435_456; // bytes of one layer that are assembled at a time

/** Returns the integer digests of all segments by track. */
export async function verify(artifact) {
  const { manifest: m, source, header, tablesAt, dataAt } = artifact;
  for (const part of [...m.qualities, ...m.tracks]) await artifact.table(part);
  await comparisons(artifact);
  check(await source.endsAt(header.fileBytes), 'file.size', 'file', `expected an end after ${header.fileBytes} bytes (HDR-10)`);

  const original = m.tracks.find((track) => track.quality === 'exact');
  const blocks = original ? tokenBlocks(await artifact.table(original), original.segments) : [];
  await source.plan(ranges(artifact, original, blocks), m.segmentation.alignment);
  await artifact.checkZeros(tablesAt + header.tablesBytes, dataAt);
  for (const quality of m.qualities) {
    for (let n = 0; n < quality.sets; n++) {
      await artifact.checkZeros(...gap(artifact, quality, await artifact.table(quality), n));
      await artifact.set(quality, n);
    }
  }
  const integers = {};
  const sides = new Map(); // quality name -> digests of the side blocks of its first track
  for (const track of m.tracks) {
    const table = await artifact.table(track);
    const digests = new Array(track.segments);
    const segment = async (n) => {
      await artifact.checkZeros(...gap(artifact, track, table, n));
      const { q, record, bytes } = await artifact.segment(track, n, true);
      digests[n] = record.integerDigest.toString('hex');
      sameSide(sides, track, n, bytes.subarray(0, record.sideBytes));
      return q;
    };
    if (track === original) await sourceDigest(artifact, track, blocks, segment);
    else for (let n = 0; n < track.segments; n++) await segment(n);
    integers[track.name] = digests;
  }
  return integers;
}

const recordOf = (part) => (part.sets === undefined ? segmentRecord : setRecord);

/** Start and stop of the padding before an object (DAT-5) in the file. The table is already checked. */
function gap({ dataAt }, part, table, n) {
  const record = recordOf(part);
  let start = part.data_start;
  if (n > 0) {
    const before = record(table, n - 1);
    start = before.offset + before.bytes;
  }
  return [dataAt + start, dataAt + record(table, n).offset];
}

/** All that verification reads behind the tables, in the order in which it does. */
async function* ranges(artifact, original, blocks) {
  const { manifest: m, header, tablesAt, dataAt } = artifact;
  yield [tablesAt + header.tablesBytes, dataAt];
  for (const part of [...m.qualities, ...m.tracks]) {
    const table = await artifact.table(part);
    const count = part.sets ?? part.segments;
    const order = part === original ? blocks.flatMap((block) => block.members) : Array(count).keys();
    for (const n of order) {
      const { offset, bytes } = recordOf(part)(table, n);
      yield gap(artifact, part, table, n);
      yield [dataAt + offset, dataAt + offset + bytes];
    }
  }
}

/** Every track against the first of its quality, and against the first that encodes each of its groups exactly. */
async function comparisons(artifact) {
  const { manifest: m } = artifact;
  for (const track of m.tracks) {
    const isExact = (t, g) => artifact.quality(t).encodings[g] === 'exact';
    const others = new Set([m.tracks.find((t) => t.quality === track.quality)]);
    m.groups.forEach((_, g) => { if (isExact(track, g)) others.add(m.tracks.find((t) => isExact(t, g))); });
    others.delete(track);
    for (const other of others) {
      compareTracks(m, other, await artifact.table(other), track, await artifact.table(track));
    }
  }
}

function sameSide(sides, track, n, side) {
  if (side.length === 0) return;
  const known = sides.get(track.quality) ?? { track, digests: new Map() };
  sides.set(track.quality, known);
  if (known.track === track) known.digests.set(n, hash(side));
  else check(known.digests.get(n).equals(hash(side)), 'segment.side', `${track.name}/segment/${n}`, `differs from that of ${known.track.name} (REC-6)`);
}

/** Segments that differ in heads only, which CID-1 hashes together: for each layer run in the order of tokens. */
function tokenBlocks(table, segments) {
  const blocks = new Map();
  for (let n = 0; n < segments; n++) {
    const { group, layerIndex, layerCount, tokenStart, tokenCount } = segmentRecord(table, n);
    const key = `${group} ${layerIndex} ${tokenStart}`;
    if (!blocks.has(key)) blocks.set(key, { group, layerIndex, layerCount, tokenCount, members: [] });
    blocks.get(key).members.push(n);
  }
  return [...blocks.values()];
}

/**
 * CID-1. A layer is hashed as [token, head, dim], but segments split heads, so those of one block are put together
 * first; a block too large for that is put together in slices of tokens, decoding it once per slice.
 */
async function sourceDigest(artifact, track, blocks, segment) {
  const { manifest: m } = artifact;
  const table = await artifact.table(track);
  const layers = m.groups.map((group) => Array.from(group.layers, () => null)); // a hasher each, when it has begun
  for (const { group: g, layerIndex, layerCount, tokenCount, members } of blocks) {
    const group = m.groups[g];
    const rowBytes = group.heads * group.head_dim * DTYPE_BYTES[group.dtype];
    const step = members.length === 1 ? tokenCount : Math.max(1, Math.floor(SLICE / (rowBytes * layerCount)));
    for (let from = 0; from < tokenCount; from += step) {
      const slices = await assemble(members, segment, table, group, rowBytes, layerCount, from, Math.min(from + step, tokenCount));
      slices.forEach((slice, i) => { (layers[g][layerIndex + i] ??= hasher()).update(slice); });
    }
  }
  const digests = hasher();
  for (const layer of layers.flat()) digests.update((layer ?? hasher()).digest());
  if (Buffer.from(digests.digest()).toString('hex') !== m.source_digest) {
    throw new Failure('data.source', track.name, 'does not restore the source that the manifest names (CID-1)');
  }
}

/** Tokens [from, to) of one block with all heads, one buffer per layer. */
async function assemble(members, segment, table, group, rowBytes, layers, from, to) {
  if (members.length === 1) {
    const q = await segment(members[0]);
    return Array.from({ length: layers }, (_, i) => q.subarray(i * q.length / layers, (i + 1) * q.length / layers));
  }
  const slices = Array.from({ length: layers }, () => Buffer.allocUnsafe((to - from) * rowBytes));
  for (const n of members) {
    const q = await segment(n);
    const { headStart, headCount, tokenCount } = segmentRecord(table, n);
    const part = rowBytes / group.heads * headCount;
    slices.forEach((slice, layer) => {
      for (let t = from; t < to; t++) {
        const at = (layer * tokenCount + t) * part;
        slice.set(q.subarray(at, at + part), (t - from) * rowBytes + rowBytes / group.heads * headStart);
      }
    });
  }
  return slices;
}
