// SPDX-License-Identifier: Apache-2.0
// What one value of the manifest shows by itself: steps 10 to 12 of ORD-1.
import { Failure, check } from './failure.mjs';

export const DTYPE_BYTES = { float32: 4, float16: 2, bfloat16: 2, float8_e4m3fn: 1, float8_e5m2: 1, uint8: 1 };
export const CODECS = ['stored', 'zstd', 'hevc'];
const TRANSFORM = 'transform-klt';
export const FEATURES = [TRANSFORM];

export const schema = (where, detail) => new Failure('manifest.schema', where, detail);
export const isObject = (v) => v !== null && typeof v === 'object' && !Array.isArray(v);

// A validator is a function of a value and its JSON pointer. Above `limit` is limit.exceeded, whatever else is wrong.
export const int = (min = 0, limit = Infinity) => (v, at) => {
  if (typeof v !== 'number') throw schema(at, 'expected an integer');
  check(v <= limit, 'limit.exceeded', at, `limit ${limit}, found ${v}`);
  if (v < min) throw schema(at, `expected at least ${min}, found ${v}`);
};
const match = (pattern) => (v, at) => {
  if (typeof v !== 'string' || !pattern.test(v)) throw schema(at, `expected a string like ${pattern}`);
};
export const oneOf = (...values) => (v, at) => {
  if (!values.includes(v)) throw schema(at, `expected one of ${values.join(', ')}`);
};
const bool = oneOf(true, false);
const nullable = (of) => (v, at) => { if (v !== null) of(v, at); };
export const text = (v, at) => {
  const bytes = typeof v === 'string' ? Buffer.byteLength(v) : 0;
  if (bytes < 1 || bytes > 1024) throw schema(at, 'expected a string of 1 to 1,024 bytes');
};
export const list = (of, { min = 0, limit = Infinity, max = Infinity } = {}) => (v, at) => {
  if (!Array.isArray(v)) throw schema(at, 'expected a list');
  check(v.length <= limit, 'limit.exceeded', at, `limit ${limit} elements, found ${v.length}`);
  if (v.length < min || v.length > max) throw schema(at, `${v.length} elements`);
  v.forEach((element, i) => of(element, `${at}/${i}`));
};
export const object = (members) => (v, at) => {
  if (!isObject(v)) throw schema(at, 'expected an object');
  for (const key of Object.keys(v)) if (!Object.hasOwn(members, key)) throw schema(`${at}/${key}`, 'unknown member');
  for (const [key, of] of Object.entries(members)) {
    if (!(key in v)) throw schema(`${at}/${key}`, 'missing member');
    of(v[key], `${at}/${key}`);
  }
};
/** An object whose member `kind` chooses among several. */
const byKind = (kinds) => (v, at) => {
  if (!isObject(v) || !Object.hasOwn(kinds, v.kind)) throw schema(`${at}/kind`, `expected one of ${Object.keys(kinds)}`);
  object({ kind: () => {}, ...kinds[v.kind] })(v, at);
};

export const digest = match(/^[0-9a-f]{64}$/);
const hash = match(/^(blake3|sha256):[0-9a-f]{64}$/);
export const name = match(/^[a-z0-9][a-z0-9-]{0,47}$/);
const cacheDtype = match(/^[a-z0-9][a-z0-9_-]{0,47}$/);
const inView = (digits) => { const v = new DataView(new ArrayBuffer(8)); v.setBigUint64(0, BigInt(`0x${digits}`)); return v; };
const positive = (size) => (v, at) => {
  match(size === 8 ? /^[0-9a-f]{16}$/ : /^[0-9a-f]{8}$/)(v, at);
  const value = size === 8 ? inView(v).getFloat64(0) : inView(v).getFloat32(4);
  if (!(value > 0 && value < Infinity)) throw schema(at, 'expected the bits of a finite number above 0 (IDN-8)');
};
const frequencies = (v, at) => {
  match(/^([0-9a-f]{8})+$/)(v, at);
  for (let i = 0; i < v.length; i += 8) {
    // +0 to the largest finite number are 0 to 7f7fffff; -0 and negative numbers lie above.
    if (parseInt(v.slice(i, i + 8), 16) > 0x7f7fffff) throw schema(at, 'negative, infinite or NaN (IDN-8)');
  }
};
const pair = list(int(1), { min: 2, max: 2 });
const side = (v, at) => {
  int(144, 8192)(v, at);
  if (v % 16 !== 0) throw schema(at, 'expected a multiple of 16 (LAY-4)');
};

const TOKENS = 2 ** 40;
export const spans = list(object({ count: int(1), digest: nullable(hash), kind: name, start: int() }));
export const anyExtensions = (v, at) => {
  for (const key of Object.keys(v)) object({ must_understand: bool, value: () => {} })(v[key], `${at}/${key}`);
};
export const model = object({ id: text, revision: nullable(text), weights_digest: nullable(hash) });
const qualities = (...encodings) => list(object({
  data_start: int(), data_stop: int(), encodings: list(oneOf(...encodings)), name,
  relative_step: nullable(positive(8)), set_table_digest: digest, sets: int(0, 65536),
}), { min: 1, limit: 16 });
const members = {
  content_id: digest,
  data_bytes: int(),
  extensions: anyExtensions,
  features: list(name),
  format: oneOf('kvformat'),
  generator: text,
  groups: list(object({
    dtype: oneOf(...Object.keys(DTYPE_BYTES)),
    head_dim: int(1, 65536),
    head_start: int(),
    heads: int(1, 65536),
    heads_total: int(1, 65536),
    layers: list(int(), { min: 1, limit: 4096 }),
    name,
    role: name,
    tokens: byKind({
      all: {},
      window: { cumulative_tokens: int(), held_start: int() },
      state: { shape: list(int(1), { min: 1, max: 8 }) },
    }),
  }), { min: 1, limit: 64 }),
  identity: object({
    adapters: list(object({ digest: nullable(hash), id: text })),
    cache_dtype: cacheDtype,
    component: oneOf('main', 'draft'),
    engine_key: nullable(object({
      engine: text, engine_version: nullable(text), hash_algorithm: text, key: text, rank: int(), world_size: int(),
    })),
    kind: oneOf('tokens', 'engine_key', 'unbound'),
    layers_total: int(1, 65536),
    model,
    rope: list(object({
      inv_freq: frequencies, keys_rotated: bool, layers: list(int()), pairing: oneOf('half', 'interleaved'),
      scaling: positive(8),
    })),
    rotation: nullable(object({ digest: nullable(hash), name })),
    scale_scheme: nullable(object({ name, scales: list(object({ bits: positive(4), layer: int(), role: name })) })),
    tokenizer: nullable(object({ digest: nullable(hash), id: text })),
  }),
  lineage: byKind({ exact: {}, lossy: { generations: int(1), profile: nullable(digest), quality: name } }),
  qualities: qualities('quantised', 'exact'),
  segmentation: object({
    alignment: oneOf(1, 4096),
    groups: list(object({ heads: int(1, 65536), layers: int(1, 3) })),
    order: oneOf('token-major', 'layer-major'),
    tokens: int(1, 65536),
  }),
  source_digest: digest,
  tokens: object({
    chain: nullable(object({ block_tokens: oneOf(256), hashes: list(digest), parent: nullable(digest), salted: bool })),
    content: spans,
    count: int(0, TOKENS),
    first_position: int(0, TOKENS),
  }),
  tracks: list(object({
    codecs: list(oneOf(...CODECS)), data_start: int(), data_stop: int(), encoder: text,
    layouts: list(object({
      fold: pair, frames: int(1, 65536), grid: pair, height: side, order: oneOf('time', 'raster'), tile: pair, width: side,
    }), { limit: 64 }),
    name: match(/^[a-z0-9][a-z0-9-]{0,47}\/(stored|zstd|hevc)$/),
    quality: name, segments: int(0, 1_048_576), table_digest: digest,
  }), { min: 1, limit: 32 }),
  valid_lengths: nullable(list(int(0, TOKENS))),
  version: oneOf('0.9'),
};
const plain = object(members);
const withTransforms = object({ // TRF-1
  ...members, profile: object({ digest }), qualities: qualities('quantised', 'exact', 'transformed'),
});

/** Steps 10 and 11. This reader knows one feature and no extension. */
export function checkNeeds({ features, extensions }) {
  if (!Array.isArray(features) || !features.every((f) => typeof f === 'string')) {
    throw schema('/features', 'expected a list of names');
  }
  for (const f of features) check(FEATURES.includes(f), 'feature.unknown', '/features', `this reader has ${FEATURES}, found ${f}`);
  if (!isObject(extensions) || !Object.values(extensions).every(isObject)) {
    throw schema('/extensions', 'expected an object of objects');
  }
  for (const [key, extension] of Object.entries(extensions)) {
    check(extension.must_understand !== true, 'extension.unknown', `/extensions/${key}`, 'must be understood');
  }
}

/** Steps 10 to 12. */
export function checkManifest(m) {
  checkNeeds(m);
  (m.features.includes(TRANSFORM) ? withTransforms : plain)(m, '');
}
