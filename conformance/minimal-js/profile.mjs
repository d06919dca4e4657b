// SPDX-License-Identifier: Apache-2.0
// Calibration profiles: section 9.6, and whether one fits an artifact (TRF-5).
import { hash, hex } from './digest.mjs';
import { Failure, check } from './failure.mjs';
import { HEADER_BYTES, PROFILE_MAGIC, parseHeader } from './header.mjs';
import { canonical, parse } from './json.mjs';
import { FEATURES, anyExtensions, checkNeeds, digest, int, list, model, name, object, oneOf, text } from './manifest.mjs';
import { array, inBiasRange } from './sets.mjs';
import { openSource } from './source.mjs';

const CHANNELS_LIMIT = 16_384; // PRF-6
const ROW_LIMIT = 131_072; // PRF-4
const CACHE_BYTES = 256 * 2 ** 20;
const INTEGERS = { int16: Int16Array, int32: Int32Array };
const EMPTY = hex(Buffer.alloc(0));
const SLOPE_LIMIT = 1 + 2 ** -40; // of cos * cos + sin * sin (PRF-5)

const schema = object({
  data_bytes: int(),
  extensions: anyExtensions,
  features: list(oneOf(...FEATURES), { min: 1, max: 1 }),
  format: oneOf('kvformat-profile'),
  generator: text,
  model,
  transforms: list(object({
    digest, dtype: oneOf(...Object.keys(INTEGERS)), head_dim: int(1, 65536), head_start: int(), heads: int(1, 65536),
    heads_total: int(1, 65536), layer: int(), pairing: oneOf('none', 'half', 'interleaved'), pairs: int(), quality: name, role: name,
  })),
  version: oneOf('0.9'),
  writer: object({ bytes: int(), digest }),
});

/**
 * The profile in the file or at the URL that the caller named, checked but for its objects. A file with another header
 * than that of `wanted` is as good as none. Steps 6 to 11 of ORD-1 keep their codes, what comes behind is profile.content.
 */
export async function openProfile(url, wanted, timeoutSeconds) {
  const source = await openSource(url, timeoutSeconds);
  try {
    return await openIn(source, wanted);
  } catch (error) {
    await source.close();
    throw error;
  }
}

async function openIn(source, wanted) {
  const header = headerOf(source, wanted);
  const given = header.manifestDigest.toString('hex');
  check(given === wanted, 'profile.missing', '/profile/digest', `needs the profile ${wanted}, was given ${given} (TRF-4)`);
  check(await source.endsAt(header.fileBytes), 'file.size', 'profile', `expected an end after ${header.fileBytes} bytes (HDR-10)`);
  check(header.tablesBytes === 0, 'profile.content', 'profile/header/tables_bytes', `expected 0, found ${header.tablesBytes}`);
  const bytes = await source.read(HEADER_BYTES, header.manifestBytes);
  check(hash(bytes).equals(header.manifestDigest), 'manifest.digest', 'profile', 'the header names another manifest');
  const manifest = parseManifest(bytes);
  const dataAt = HEADER_BYTES + header.manifestBytes;
  check(header.fileBytes - dataAt === manifest.data_bytes, 'profile.content', 'profile/data_bytes', 'file_bytes is another (HDR-7)');
  return new Profile(source, manifest, placeObjects(manifest, dataAt));
}

function headerOf(source, wanted) {
  try {
    return parseHeader(source.head, null, 'file.size', PROFILE_MAGIC);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    throw new Failure('profile.missing', '/profile/digest', `needs the profile ${wanted}; what was given is none: ${error.message}`);
  }
}

/** PRF-1: what single values show has one code, also above a limit. What this reader lacks keeps its own (ORD-1). */
function parseManifest(bytes) {
  try {
    const manifest = parse(bytes);
    check(Buffer.from(canonical(manifest)).equals(bytes), 'manifest.canonical', 'profile', 'not in canonical form (JSN-7)');
    checkNeeds(manifest);
    schema(manifest, 'profile');
    return manifest;
  } catch (error) {
    if (!['manifest.schema', 'limit.exceeded'].includes(error.code)) throw error;
    throw new Failure('profile.content', error.where, error.message);
  }
}

const identityOf = ({ quality, role, layer }) => `${quality} ${role} ${layer}`;

/** -1, 0 or 1; names are ASCII, so the order of code units is that of bytes. */
function compare(a, b) {
  for (const key of ['quality', 'role', 'layer']) if (a[key] !== b[key]) return a[key] < b[key] ? -1 : 1;
  return 0;
}

/** Where each object lies, by quality, role and layer. What the list shows by itself is checked. */
function placeObjects(manifest, dataAt) {
  const places = new Map();
  let cursor = 0;
  manifest.transforms.forEach((t, i) => {
    const must = (condition, detail) => check(condition, 'profile.content', `profile/transforms/${i}`, detail);
    must(i === 0 || compare(manifest.transforms[i - 1], t) < 0, 'not in ascending order, or twice (PRF-1, PRF-2)');
    must(t.heads * t.head_dim <= CHANNELS_LIMIT, `more than ${CHANNELS_LIMIT} channels (PRF-6)`);
    must(t.pairing === 'none' ? t.pairs === 0 : t.pairs >= 1 && 2 * t.pairs <= t.head_dim, 'pairs (PRF-1)');
    const C = t.heads * t.head_dim;
    const bytes = 8 * C + 16 * t.pairs + C * C * INTEGERS[t.dtype].BYTES_PER_ELEMENT;
    places.set(identityOf(t), { transform: t, offset: dataAt + cursor, bytes });
    cursor += bytes;
  });
  // A difference stays exact (CNV-3): the list bounds the cursor far below 2^53.
  const { bytes, digest: written } = manifest.writer;
  check(bytes > 0 || written === EMPTY, 'profile.content', 'profile/writer/digest', 'no bytes, and not their digest (PRF-1)');
  check(manifest.data_bytes - cursor === bytes, 'profile.content', 'profile/data_bytes',
    `expected ${cursor} and those of the writer's object (PRF-1)`);
  return places;
}

class Profile {
  #source;
  #places;
  #read = new Map(); // transforms, checked, up to CACHE_BYTES
  #readBytes = 0;

  constructor(source, manifest, places) {
    this.#source = source;
    this.#places = places;
    this.manifest = manifest;
  }

  /** TRF-5 for these groups of an artifact with this identity, of which some part is to be restored. */
  checkFits(identity, quality, groups) {
    const { id, weights_digest: weights } = this.manifest.model;
    const own = identity.model;
    const must = (condition, detail) => check(condition, 'profile.content', 'profile', `${detail} (TRF-5)`);
    must(id === own.id, `it is for the model ${id}, the artifact of ${own.id}`);
    must(weights === null || own.weights_digest === null || weights === own.weights_digest, 'it is for other weights');
    for (const group of groups) {
      for (const layer of group.layers) this.#checkFit(identity, group, { quality, role: group.role, layer }, must);
    }
  }

  #checkFit({ rope }, group, wanted, must) {
    const transform = this.#places.get(identityOf(wanted))?.transform;
    must(transform, `no transform for ${identityOf(wanted)}`);
    for (const key of ['heads_total', 'heads', 'head_start', 'head_dim']) {
      must(transform[key] === group[key], `${identityOf(wanted)}: ${key} is ${transform[key]}, in the artifact ${group[key]}`);
    }
    if (transform.pairs === 0) return;
    const fits = rope.some((r) => r.layers.includes(wanted.layer) && r.keys_rotated && r.pairing === transform.pairing
      && r.inv_freq.length === 8 * transform.pairs);
    must(fits, `${identityOf(wanted)}: no element of rope rotates ${transform.pairs} pairs of pairing ${transform.pairing}`);
  }

  /** The transform of one layer: {pairing, mean, rowScale, cos, sin, matrix}. It must be there (checkFits). */
  async transform(quality, role, layer) {
    const key = identityOf({ quality, role, layer });
    if (this.#read.has(key)) return this.#read.get(key);
    const { transform, offset, bytes } = this.#places.get(key);
    const value = parseTransform(await this.#source.read(offset, bytes), transform, `profile ${key}`);
    if (this.#readBytes + bytes > CACHE_BYTES) {
      this.#read.clear();
      this.#readBytes = 0;
    }
    this.#read.set(key, value);
    this.#readBytes += bytes;
    return value;
  }

  close() {
    return this.#source.close();
  }
}

function parseTransform(bytes, { digest: expected, dtype, heads, head_dim: D, pairing, pairs }, where) {
  const must = (condition, detail) => check(condition, 'profile.content', where, detail);
  must(hash(bytes).toString('hex') === expected, 'the manifest names another object (PRF-3)');
  const C = heads * D;
  let at = 0;
  const take = (Type, count) => {
    const values = array(Type, bytes, at, count);
    at += values.byteLength;
    return values;
  };
  const transform = {
    pairing, mean: take(Float32Array, C), rowScale: take(Float32Array, C), cos: take(Float64Array, pairs), sin: take(Float64Array, pairs),
    matrix: take(INTEGERS[dtype], C * C),
  };
  must(transform.mean.every(inBiasRange), 'a mean is out of range (PRF-5)');
  must(transform.rowScale.every((x) => x >= 2 ** -40 && x <= 2 ** 22), 'a row_scale is out of range (PRF-5)');
  transform.cos.forEach((c, i) => {
    const s = transform.sin[i];
    must(Math.abs(c) <= 1 && Math.abs(s) <= 1 && c * c + s * s <= SLOPE_LIMIT, `cos and sin of pair ${i} (PRF-5)`);
  });
  for (let c = 0; c < C; c++) {
    let sum = 0;
    for (let k = c * C; k < (c + 1) * C; k++) sum += Math.abs(transform.matrix[k]);
    must(sum <= ROW_LIMIT, `row ${c} of the matrix sums to ${sum} (PRF-4)`);
  }
  return transform;
}
