// SPDX-License-Identifier: Apache-2.0
// Verification of a whole artifact: section 11.3.
import { hash, hasher } from './digest.mjs';
import { Failure, check } from './failure.mjs';
import { held } from './grid.mjs';
import { DTYPE_BYTES } from './manifest.mjs';
import { compareTracks, segmentRecord, setRecord } from './tables.mjs';

const SLICE = 268_435_456; // bytes of one layer that are assembled at a time

/** Returns the integer digests of all segments by track. */
export async function verify(artifact) {
  const { manifest: m } = artifact;
  for (const part of [...m.qualities, ...m.tracks]) await artifact.table(part);
  await comparisons(artifact);
  await padding(artifact);
  for (const quality of m.qualities) {
    for (let n = 0; n < quality.sets; n++) await artifact.set(quality, n);
  }
  const source = m.tracks.find((track) => track.quality === 'exact');
  const integers = {};
  for (const track of m.tracks) {
    const reference = m.tracks.find((t) => t.quality === track.quality);
    const digests = new Array(track.segments);
    const segment = async (n) => {
      const { q, record, bytes } = await artifact.segment(track, n, true);
      digests[n] = record.integerDigest.toString('hex');
      if (reference !== track && record.sideBytes > 0) await sameSide(artifact, reference, track, n, bytes);
      return q;
    };
    if (track === source) await sourceDigest(artifact, track, segment);
    else for (let n = 0; n < track.segments; n++) await segment(n);
    integers[track.name] = digests;
  }
  return integers;
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

async function sameSide(artifact, reference, track, n, bytes) {
  const record = segmentRecord(await artifact.table(reference), n);
  const side = await artifact.readData(record.offset, record.sideBytes);
  check(side.equals(bytes.subarray(0, record.sideBytes)), 'segment.side', `${track.name}/segment/${n}`,
    `differs from that of ${reference.name} (REC-6)`);
}

/** Zeros between the tables and the data, and between objects (HDR-9, DAT-5). The tables are already checked. */
async function padding(artifact) {
  const { manifest: m, source, header, tablesAt, dataAt } = artifact;
  let cursor = tablesAt + header.tablesBytes - dataAt; // at most 0: the gap before the data counts as well
  const gap = async (stop) => {
    if (stop > cursor) {
      const bytes = await source.read(dataAt + cursor, stop - cursor);
      check(bytes.every((b) => b === 0), 'data.padding', `data offset ${cursor}`, 'expected zeros');
    }
  };
  await gap(0);
  cursor = 0;
  for (const part of [...m.qualities, ...m.tracks]) {
    const table = await artifact.table(part);
    const read = part.sets === undefined ? segmentRecord : setRecord;
    for (let n = 0; n < (part.sets ?? part.segments); n++) {
      const record = read(table, n);
      await gap(record.offset);
      cursor = record.offset + record.bytes;
    }
  }
}

/**
 * CID-1. A layer is hashed as [token, head, dim], but segments split heads, so those of one token block are put
 * together first; a block too large for that is put together in slices of tokens, decoding it once per slice.
 */
async function sourceDigest(artifact, track, segment) {
  const { manifest: m } = artifact;
  const table = await artifact.table(track);
  const blocks = m.groups.map(() => new Map()); // group -> "layer token" -> segments of its head runs, in order
  for (let n = 0; n < track.segments; n++) {
    const { group, layerIndex, tokenStart } = segmentRecord(table, n);
    const key = `${layerIndex} ${tokenStart}`;
    if (!blocks[group].has(key)) blocks[group].set(key, []);
    blocks[group].get(key).push(n);
  }
  const digests = hasher();
  for (const [g, group] of m.groups.entries()) {
    const rowBytes = group.heads * group.head_dim * DTYPE_BYTES[group.dtype];
    const cut = m.segmentation.groups[g].layers;
    const [start, stop] = held(group, m.tokens.count);
    for (let layer = 0; layer < group.layers.length; layer += cut) {
      const hashers = Array.from({ length: Math.min(cut, group.layers.length - layer) }, hasher);
      for (let token = start; token < stop;) {
        const members = blocks[g].get(`${layer} ${token}`);
        const count = segmentRecord(table, members[0]).tokenCount;
        const step = members.length === 1 ? count : Math.max(1, Math.floor(SLICE / (rowBytes * hashers.length)));
        for (let from = 0; from < count; from += step) {
          const to = Math.min(from + step, count);
          const slices = await assemble(members, segment, table, group, rowBytes, hashers.length, from, to);
          hashers.forEach((h, i) => h.update(slices[i]));
        }
        token += count;
      }
      for (const h of hashers) digests.update(h.digest());
    }
  }
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
