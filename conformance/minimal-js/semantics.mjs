// SPDX-License-Identifier: Apache-2.0
// What shows only when two places of the manifest, or header and manifest, are compared: step 13 of ORD-1.
import { hex } from './digest.mjs';
import { check } from './failure.mjs';
import { countCells, longestBlock } from './grid.mjs';
import { HEADER_BYTES } from './header.mjs';
import { canonical } from './json.mjs';
import { DTYPE_BYTES } from './manifest.mjs';

const DECODED_LIMIT = 268_435_456;
const CHANNELS_LIMIT = 1_048_576;
const TOKENS_LIMIT = 2 ** 40;
export const CELLS_LIMIT = 1_048_576;

const ascending = (values) => values.every((v, i) => i === 0 || values[i - 1] < v);
const distinct = (values) => new Set(values).size === values.length;
const last = (values) => values[values.length - 1];
export const align = (n, a) => n + ((a - (n % a)) % a);
const meant = (condition, where, detail) => check(condition, 'manifest.semantics', where, detail);

export function checkSemantics(m, header) {
  checkContent(m);
  checkQualities(m);
  checkTracks(m);
  checkPlan(m, header);
  const named = { groups: m.groups, identity: m.identity, source_digest: m.source_digest };
  meant(hex(Buffer.from(canonical(named))) === m.content_id, '/content_id', 'not the digest of its parts (CID-3)');
}

/** What does not depend on the encoding. A writer checks it before it begins. */
export function checkContent(m) {
  meant(ascending(m.features), '/features', 'must ascend without repetition (MAN-3)');
  for (const part of ['groups', 'qualities', 'tracks']) {
    meant(distinct(m[part].map((x) => x.name)), `/${part}`, 'a name occurs twice (MAN-5)');
  }
  checkIdentity(m);
  checkTokens(m);
  checkGroups(m);
  checkSegmentation(m);
}

function checkIdentity({ identity, tokens }) {
  const taken = new Set();
  identity.rope.forEach(({ layers }, i) => {
    const at = `/identity/rope/${i}/layers`;
    meant(ascending(layers) && (layers.length === 0 || last(layers) < identity.layers_total), at, 'IDN-3');
    for (const layer of layers) {
      meant(!taken.has(layer), at, `layer ${layer} is in two elements (IDN-3)`);
      taken.add(layer);
    }
  });
  meant((identity.kind === 'engine_key') === (identity.engine_key !== null), '/identity/engine_key', 'IDN-4');
  meant((identity.kind === 'tokens') === (tokens.chain !== null), '/tokens/chain', 'IDN-5');
  const scales = identity.scale_scheme?.scales ?? [];
  meant(scales.every((s) => s.layer < identity.layers_total), '/identity/scale_scheme/scales', 'IDN-7');
  meant(distinct(scales.map((s) => `${s.layer} ${s.role}`)), '/identity/scale_scheme/scales', 'IDN-7');
  const key = identity.engine_key;
  if (key !== null) meant(key.rank < key.world_size, '/identity/engine_key/rank', 'ENG-1');
}

function checkTokens({ tokens }) {
  const { count: T, first_position: first, content, chain } = tokens;
  check(first + T <= TOKENS_LIMIT, 'limit.exceeded', '/tokens', 'first_position + count is above 2^40');
  let free = first;
  for (const [i, span] of content.entries()) {
    meant(span.start >= free && span.start <= first + T && span.count <= first + T - span.start,
      `/tokens/content/${i}`, 'spans must ascend, be disjoint and lie inside (TOK-8)');
    free = span.start + span.count;
  }
  if (chain === null) return;
  const open = content.find((span) => span.digest === null);
  const blocks = open ? Math.floor((open.start - first) / 256) : Math.ceil(T / 256);
  meant(chain.hashes.length === blocks, '/tokens/chain/hashes', `expected ${blocks} (TOK-5)`);
  meant(first % 256 === 0 && (chain.parent === null) === (first === 0), '/tokens/chain/parent', 'TOK-7');
}

function checkGroups({ groups, identity, tokens, valid_lengths: lengths }) {
  const { count: T, first_position: first } = tokens;
  const taken = new Set();
  groups.forEach((g, i) => {
    const at = `/groups/${i}`;
    check(g.heads * g.head_dim <= CHANNELS_LIMIT, 'limit.exceeded', at, `heads * head_dim above ${CHANNELS_LIMIT}`);
    meant(ascending(g.layers) && last(g.layers) < identity.layers_total, `${at}/layers`, 'GRP-2');
    meant(g.heads <= g.heads_total - g.head_start, `${at}/heads`, 'GRP-3');
    for (const layer of g.layers) {
      meant(!taken.has(`${g.role} ${layer}`), `${at}/layers`, `layer ${layer} twice in role ${g.role} (GRP-4)`);
      taken.add(`${g.role} ${layer}`);
    }
    if (g.tokens.kind === 'window') {
      meant(g.tokens.held_start <= T && g.tokens.cumulative_tokens === first + T, `${at}/tokens`, 'GRP-5');
    }
    if (g.tokens.kind === 'state') {
      meant(g.tokens.shape.reduce((a, b) => a * b, 1) === g.head_dim, `${at}/tokens/shape`, 'GRP-6');
    }
  });
  const needed = groups.some((g) => g.tokens.kind !== 'all');
  meant(needed === (lengths !== null), '/valid_lengths', 'LEN-1');
  // Strictly ascending, at most T and containing T: T is the last one.
  if (needed) meant(ascending(lengths) && last(lengths) === T, '/valid_lengths', 'LEN-1, LEN-2');
}

function checkSegmentation(m) {
  const cuts = m.segmentation.groups;
  meant(cuts.length === m.groups.length, '/segmentation/groups', 'one element per group (SEG-4)');
  cuts.forEach((cut, i) => meant(cut.heads <= m.groups[i].heads, `/segmentation/groups/${i}/heads`, 'SEG-4'));
}

function checkQualities(m) {
  m.qualities.forEach((q, i) => {
    const at = `/qualities/${i}`;
    meant(q.encodings.length === m.groups.length, `${at}/encodings`, 'one element per group (QUA-2)');
    const exact = q.encodings.every((e) => e === 'exact');
    meant(exact === (q.name === 'exact'), `${at}/name`, 'QUA-2');
    m.groups.forEach((g, k) => {
      const mustBeExact = g.dtype === 'uint8' || g.tokens.kind === 'state';
      meant(!mustBeExact || q.encodings[k] === 'exact', `${at}/encodings/${k}`, 'QUA-3');
    });
    meant(!exact || (q.sets === 0 && q.relative_step === null), at, 'QUA-4');
    meant(m.tracks.some((t) => t.quality === q.name), at, 'no track (TRK-4)');
    q.encodings.forEach((encoding, k) => meant(encoding !== 'transformed' || m.segmentation.groups[k].heads === m.groups[k].heads,
      `/segmentation/groups/${k}/heads`, 'a transformed group needs all heads in a segment (TRF-2)'));
  });
  const transformed = m.qualities.some((q) => q.encodings.includes('transformed'));
  meant(transformed || !m.features.includes('transform-klt'), '/features', 'transform-klt, and no group is transformed (TRF-1)');
}

function checkTracks(m) {
  const cells = countCells(m);
  check(cells <= CELLS_LIMIT, 'limit.exceeded', '/segmentation', `limit ${CELLS_LIMIT} cells, found ${cells}`);
  m.tracks.forEach((t, i) => {
    const at = `/tracks/${i}`;
    const quality = m.qualities.find((q) => q.name === t.quality);
    meant(quality, `${at}/quality`, 'no such quality (TRK-2)');
    meant(t.codecs.some((codec) => t.name === `${t.quality}/${codec}`), `${at}/name`, 'TRK-2');
    meant(t.codecs.length === m.groups.length, `${at}/codecs`, 'one codec per group (TRK-3)');
    t.codecs.forEach((codec, g) => meant(codec !== 'hevc' || quality.encodings[g] !== 'exact',
      `${at}/codecs/${g}`, 'hevc for an exact group (TRK-3)'));
    meant(t.segments === cells, `${at}/segments`, `expected ${cells} (TAB-2)`);
    meant(t.layouts.length === 0 || t.codecs.includes('hevc'), `${at}/layouts`, 'TRK-5');
    meant(distinct(t.layouts.map(canonical)), `${at}/layouts`, 'two are equal (TRK-6)');
    check(new Set(t.layouts.map((y) => `${y.width} ${y.height}`)).size <= 4, 'limit.exceeded', `${at}/layouts`,
      'more than 4 picture sizes');
    t.layouts.forEach((y, k) => {
      check(y.frames * y.width * y.height * 3 <= DECODED_LIMIT, 'limit.exceeded', `${at}/layouts/${k}`,
        `F * width * height * 3 above ${DECODED_LIMIT}`);
      meant(y.grid[0] * y.tile[0] * y.fold[0] <= y.height && y.grid[1] * y.tile[1] * y.fold[1] <= y.width,
        `${at}/layouts/${k}`, 'the grid is larger than the picture (LAY-3)');
    });
  });
  m.groups.forEach((g, i) => {
    const cut = m.segmentation.groups[i];
    const exact = m.qualities.some((q) => q.encodings[i] === 'exact');
    const bytes = Math.min(cut.layers, g.layers.length) * longestBlock(g, m.tokens.count, m.segmentation.tokens)
      * cut.heads * g.head_dim * (exact ? DTYPE_BYTES[g.dtype] : 1);
    check(bytes <= DECODED_LIMIT, 'limit.exceeded', `/groups/${i}`, `a segment decodes to more than ${DECODED_LIMIT}`);
  });
}

/** Where everything lies: DAT-1, DAT-4, HDR-7, HDR-8. */
function checkPlan(m, header) {
  let cursor = 0;
  for (const part of [...m.qualities, ...m.tracks]) {
    meant(part.data_start === cursor && part.data_stop >= cursor, part.name, `data_start must be ${cursor} (DAT-1)`);
    cursor = part.data_stop;
  }
  meant(m.data_bytes === cursor, '/data_bytes', `expected ${cursor} (DAT-4)`);
  const tables = m.qualities.reduce((sum, q) => sum + 64 * q.sets, 0) + m.tracks.reduce((sum, t) => sum + 128 * t.segments, 0);
  check(header.tablesBytes === tables, 'header.field', 'header/tables_bytes', `expected ${tables} (HDR-8)`);
  const dataAt = align(HEADER_BYTES + header.manifestBytes + tables, m.segmentation.alignment);
  check(header.fileBytes - dataAt === m.data_bytes, 'header.field', 'header/file_bytes', 'HDR-7');
}
