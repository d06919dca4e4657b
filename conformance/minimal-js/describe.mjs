// SPDX-License-Identifier: Apache-2.0
// From the description of a cache (../schema/encode.schema.json) to a manifest that lacks only what depends on bytes.
import { BLOCK, Chain, findIllegal } from './chain.mjs';
import { Failure, check } from './failure.mjs';
import { countCells } from './grid.mjs';
import { DTYPE_BYTES, checkManifest } from './manifest.mjs';
import { RELATIVE_STEP } from './quantise.mjs';
import { CELLS_LIMIT, checkContent } from './semantics.mjs';

export const TRACKS = ['exact/stored', 'exact/zstd', 'near-lossless/stored', 'near-lossless/zstd'];
const ENCODER = { stored: 'none', zstd: 'libzstd as WebAssembly' };
const MEMBERS = ['content', 'first_position', 'groups', 'identity', 'restored_from', 'salt', 'segmentation', 'token_count', 'token_ids',
  'tracks', 'valid_lengths'];
const SEGMENT_BYTES = 32 * 2 ** 20; // of the source, in one segment
const SEGMENT_TOKENS = 1024;
const UNKNOWN = '0'.repeat(64);

const usage = (detail) => new Failure('usage.argument', 'SPEC', detail);
const isObject = (v) => v !== null && typeof v === 'object' && !Array.isArray(v);

export function describe(spec, generator) {
  if (!isObject(spec) || Object.keys(spec).sort().join() !== MEMBERS.join()) throw usage(`expected an object with ${MEMBERS}`);
  if (!Array.isArray(spec.groups) || !spec.groups.every(isObject)) throw usage('groups: expected a list of objects');
  const groups = spec.groups.map(({ file, ...group }) => group);
  const m = {
    content_id: UNKNOWN, data_bytes: 0, extensions: {}, features: [], format: 'kvformat', generator, groups,
    identity: spec.identity, lineage: lineage(spec.restored_from), qualities: [],
    segmentation: { alignment: 1, order: 'token-major', ...spec.segmentation, groups: groups.map(() => ({ heads: 1, layers: 1 })) },
    source_digest: UNKNOWN,
    tokens: {
      chain: spec.token_ids === null ? null : { block_tokens: BLOCK, hashes: [], parent: null, salted: spec.salt !== null },
      content: spec.content, count: spec.token_count, first_position: spec.first_position,
    },
    tracks: [], valid_lengths: spec.valid_lengths, version: '0.9',
  };
  m.segmentation.tokens ??= SEGMENT_TOKENS;
  try {
    check(groups.length > 0, 'manifest.schema', '/groups', 'no group');
    addTracks(m, spec.tracks);
    checkManifest(m);
    cut(m);
    addChain(m, spec);
    checkContent(m);
    check(countCells(m) <= CELLS_LIMIT, 'limit.exceeded', '/segmentation', `more than ${CELLS_LIMIT} segments`);
  } catch (error) {
    if (!(error instanceof Failure) || error.verdict === 'usage') throw error;
    throw new Failure(inputCode(error), error.where, error.message);
  }
  return m;
}

/** What a reader would call a fault of the manifest is a fault of the request here. */
function inputCode({ code, where }) {
  if (code === 'limit.exceeded') return 'input.range';
  if (/^\/(identity|tokens)/.test(where)) return 'input.identity';
  if (/^\/groups\/\d+\/dtype/.test(where)) return 'input.dtype';
  if (/^\/groups/.test(where)) return 'input.shape';
  return 'usage.argument';
}

/** LIN-1. Tensors of an exact track are as good as what that track was made from. */
function lineage(from) {
  if (from === null) return { kind: 'exact' };
  if (from.quality === 'exact') return from.lineage;
  return { generations: (from.lineage.generations ?? 0) + 1, kind: 'lossy', profile: null, quality: from.quality };
}

function addTracks(m, names) {
  for (const name of names) {
    if (!TRACKS.includes(name)) throw usage(`tracks: expected some of ${TRACKS}, found ${name}`);
    const [quality, codec] = name.split('/');
    if (!m.qualities.some((q) => q.name === quality)) {
      const exact = (group) => quality === 'exact' || group.dtype === 'uint8' || group.tokens?.kind === 'state'; // QUA-3
      const encodings = m.groups.map((group) => (exact(group) ? 'exact' : 'quantised'));
      if (quality !== 'exact' && !encodings.includes('quantised')) throw usage(`${name}: no group can be quantised (QUA-2)`);
      const bits = Buffer.alloc(8);
      bits.writeDoubleBE(RELATIVE_STEP);
      m.qualities.push({
        data_start: 0, data_stop: 0, encodings, name: quality, relative_step: quality === 'exact' ? null : bits.toString('hex'),
        set_table_digest: UNKNOWN, sets: 0,
      });
    }
    m.tracks.push({
      codecs: m.groups.map(() => codec), data_start: 0, data_stop: 0, encoder: ENCODER[codec], layouts: [], name, quality,
      segments: 0, table_digest: UNKNOWN,
    });
  }
}

/** Segments as large as wished, but not above SEGMENT_BYTES. */
function cut(m) {
  const { segmentation } = m;
  for (const { head_dim: D, dtype, tokens: { kind } } of m.groups) {
    const most = Math.floor(SEGMENT_BYTES / (D * DTYPE_BYTES[dtype])); // at least 128
    if (kind !== 'state') segmentation.tokens = Math.min(segmentation.tokens, most);
  }
  segmentation.groups = m.groups.map(({ layers: { length: L }, heads: H, head_dim: D, dtype, tokens: { kind } }) => {
    const tokens = kind === 'state' ? 1 : Math.min(segmentation.tokens, m.tokens.count);
    const most = Math.max(1, Math.floor(SEGMENT_BYTES / Math.max(1, tokens * D * DTYPE_BYTES[dtype]))); // heads of all layers
    const layers = Math.max(1, Math.min(3, L, Math.floor(most / H)));
    return { heads: Math.min(H, most), layers };
  });
}

/** Section 6.2: the chain of the whole sequence, of which the manifest holds the part from first_position on. */
function addChain(m, { token_ids: ids, salt, content }) {
  const { chain, count: T, first_position: first } = m.tokens;
  const refuse = (detail) => new Failure('input.identity', 'SPEC', detail);
  m.tokens.content = content.filter((span) => span.start >= first);
  const before = content.filter((span) => span.start < first);
  if (before.some((span) => span.start + span.count > first)) throw refuse('a content span reaches over first_position (TOK-8)');
  if (chain === null) {
    if (m.identity.kind === 'tokens') throw refuse('the identity is of kind tokens, but there are no token ids (IDN-5)');
    if (salt !== null) throw refuse('a salt without token ids');
    return;
  }
  if (!Array.isArray(ids) || ids.length !== first + T) throw refuse(`expected ${first + T} token ids`);
  const illegal = findIllegal(ids, content);
  if (illegal >= 0) throw refuse(`token id ${ids[illegal]} at position ${illegal} (TOK-6)`);
  if (first % BLOCK !== 0) throw refuse('first_position of a chain must be a multiple of 256 (TOK-7)');
  if (before.some((span) => span.digest === null)) throw refuse('a span without digest before first_position ends the chain');
  if (salt !== null && !/^([0-9a-f]{2})+$/.test(salt)) throw usage('salt: expected hexadecimal digits');

  const links = new Chain(m.identity, Buffer.from(salt ?? '', 'hex'));
  for (let at = 0; at < first; at += BLOCK) links.add(ids, at, at + BLOCK, content);
  chain.parent = first === 0 ? null : links.link.toString('hex');
  const open = m.tokens.content.find((span) => span.digest === null);
  for (let at = first; at < first + T; at += BLOCK) {
    const stop = Math.min(at + BLOCK, first + T);
    if (open && stop > open.start) break; // TOK-5
    chain.hashes.push(links.add(ids, at, stop, content));
  }
}
