// SPDX-License-Identifier: Apache-2.0
// Restore a part of a track to a file: section 11.2. Segments are decoded one at a time, and written to their places.
import { hasher } from './digest.mjs';
import { publish, writeAll } from './drafts.mjs';
import { Failure, check } from './failure.mjs';
import { held } from './grid.mjs';
import { DTYPE_BYTES } from './manifest.mjs';
import { segmentRecord } from './tables.mjs';

const CHUNK = 4 * 2 ** 20;

/**
 * Which part of each group a selection names, in indices of the group, and where it lies in the output: each layer
 * must be in some group, each head in all that hold one of the layers (PAR-4). For tokens see README.md.
 */
export function select(m, { tokens, layers, heads }) {
  const T = m.tokens.count;
  const refuse = (what) => new Failure('usage.selection', what, 'the artifact does not hold all that is asked for (PAR-4)');
  if (tokens) {
    if (tokens[1] > T) throw refuse('tokens');
    const lengths = m.valid_lengths;
    check(lengths === null || (tokens[0] === 0 && lengths.includes(tokens[1])), 'tokens.length', 'tokens',
      `layers with a window or state serve only the prefixes ${lengths}`);
  }
  if (layers) {
    const all = new Set(m.groups.flatMap((g) => g.layers));
    for (let layer = layers[0]; layer < layers[1]; layer++) if (!all.has(layer)) throw refuse('layers');
  }
  const parts = [];
  let offset = 0;
  m.groups.forEach((g, index) => {
    const inside = g.layers.map((layer, i) => (!layers || (layer >= layers[0] && layer < layers[1]) ? i : -1)).filter((i) => i >= 0);
    if (inside.length === 0) return;
    const headRun = heads ? [heads[0] - g.head_start, heads[1] - g.head_start] : [0, g.heads];
    if (headRun[0] < 0 || headRun[1] > g.heads) throw refuse('heads');
    let tokenRun = held(g, T);
    if (tokens && g.tokens.kind !== 'state') {
      const start = Math.max(tokenRun[0], tokens[0]);
      tokenRun = [start, Math.max(start, Math.min(tokenRun[1], tokens[1]))];
    }
    const rowBytes = (headRun[1] - headRun[0]) * g.head_dim * DTYPE_BYTES[g.dtype];
    const part = { index, name: g.name, layers: [inside[0], inside.at(-1) + 1], heads: headRun, tokens: tokenRun, rowBytes, offset };
    part.bytes = inside.length * (tokenRun[1] - tokenRun[0]) * rowBytes;
    offset += part.bytes;
    parts.push(part);
  });
  return parts;
}

/** Returns the digest of each group's bytes. No file is left behind on failure (ERR-4), and none replaced. */
export async function restoreTo(output, artifact, track, parts) {
  const { digests } = await publish(output, async (draft) => {
    const file = await draft();
    return { file, digests: await fill(file, artifact, track, parts) };
  });
  return digests;
}

/** What a segment holds of the selected part of its group, or null. */
function overlap(record, byGroup) {
  const part = byGroup.get(record.group);
  if (!part) return null;
  const common = ([a, b], start, count) => [Math.max(a, start), Math.min(b, start + count)];
  const layers = common(part.layers, record.layerIndex, record.layerCount);
  const tokens = common(part.tokens, record.tokenStart, record.tokenCount);
  const heads = common(part.heads, record.headStart, record.headCount);
  return [layers, tokens, heads].every(([a, b]) => a < b) ? { part, layers, tokens, heads } : null;
}

async function fill(file, artifact, track, parts) {
  const table = await artifact.table(track);
  const byGroup = new Map(parts.map((part) => [part.index, part]));
  const numbers = [];
  for (let n = 0; n < track.segments; n++) if (overlap(segmentRecord(table, n), byGroup)) numbers.push(n);
  await artifact.prepare(track, numbers);
  for (const n of numbers) {
    const record = segmentRecord(table, n);
    const { part, layers: [l0, l1], tokens: [t0, t1], heads: [h0, h1] } = overlap(record, byGroup);
    const { restored } = await artifact.segment(track, n, false);
    const headBytes = part.rowBytes / (part.heads[1] - part.heads[0]);
    const partTokens = part.tokens[1] - part.tokens[0];
    for (let l = l0; l < l1; l++) {
      const from = (t) => ((l - record.layerIndex) * record.tokenCount + t - record.tokenStart) * record.headCount * headBytes;
      const to = (t) => part.offset + ((l - part.layers[0]) * partTokens + t - part.tokens[0]) * part.rowBytes;
      if (h1 - h0 === record.headCount && h1 - h0 === part.heads[1] - part.heads[0]) {
        await writeAll(file, restored.subarray(from(t0), from(t1)), to(t0)); // whole rows are adjacent on both sides
        continue;
      }
      for (let t = t0; t < t1; t++) {
        const at = from(t) + (h0 - record.headStart) * headBytes;
        await writeAll(file, restored.subarray(at, at + (h1 - h0) * headBytes), to(t) + (h0 - part.heads[0]) * headBytes);
      }
    }
  }
  const digests = {};
  const chunk = Buffer.allocUnsafe(CHUNK);
  for (const part of parts) {
    const h = hasher();
    for (let done = 0; done < part.bytes;) {
      const { bytesRead } = await file.read(chunk, 0, Math.min(CHUNK, part.bytes - done), part.offset + done);
      if (bytesRead === 0) throw new Failure('io.write', part.name, 'the output is shorter than what was written');
      h.update(chunk.subarray(0, bytesRead));
      done += bytesRead;
    }
    digests[part.name] = Buffer.from(h.digest()).toString('hex');
  }
  return digests;
}
