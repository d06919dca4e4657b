// SPDX-License-Identifier: Apache-2.0
// Transformed groups and calibration profiles (sections 9.5 and 9.6). Bits in tables were computed with NumPy.
import assert from 'node:assert/strict';
import { readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import { hash, hex } from './digest.mjs';
import { canonical } from './json.mjs';
import { answer, cli, here, putTogether, seal, takeApart, temporary } from './testing.mjs';
import { restoreRows, turns } from './transform.mjs';

const TINY = here('../cases/faulty/trf-0027-profile-missing-or-damaged/input.kvf'); // keys of layers 1 and 3, [2, 3, 2, 4]
const TINY_PROFILE = here('../cases/faulty/trf-0027-profile-missing-or-damaged/profile.kvp');
const TRACK = 'near-lossless/stored';

const float = (digits) => Buffer.from(digits, 'hex').readFloatBE(0);
const digits = (x) => { const b = Buffer.alloc(4); b.writeFloatBE(x); return b.toString('hex'); };
const turn = (pairs) => ({ cos: Float64Array.from(pairs, ([c]) => c), sin: Float64Array.from(pairs, ([, s]) => s) });

/** Values [token][channel] of integers [token][channel], with a transform that changes nothing but what is given. */
function rows(q, { heads = 1, scale = 1, factors = null, firstPosition = 0, pairs = [], ...transform }) {
  const C = q[0].length;
  const out = [];
  const whole = {
    mean: new Float32Array(C), rowScale: new Float32Array(C).fill(1), pairing: 'half', ...turn(pairs),
    matrix: Int32Array.from({ length: C * C }, (_, i) => Number(i % (C + 1) === 0)), ...transform,
  };
  restoreRows(Uint8Array.from(q.flat()), { heads, D: C / heads, firstPosition }, scale, factors, whole, (_, row) => out.push([...row]));
  return out;
}

test('sums reach 2^24 and are exact (TRF-6)', () => {
  const [most, least] = [131_072, -131_072];
  const all = Array(8).fill(0);
  const at = (matrix, q) => rows([q], { matrix: Int32Array.from([...matrix, ...Array(56).fill(0)]) })[0][0];
  assert.equal(at([least, 0, 0, 0, 0, 0, 0, 0], all), 2 ** 24);
  assert.equal(at(Array(8).fill(16_384), all), -(2 ** 24));
  assert.equal(at([131_071, 1, 0, 0, 0, 0, 0, 0], [0, 127, ...Array(6).fill(0)]), -(2 ** 24) + 127);
  assert.equal(at([-131_071, 1, 0, 0, 0, 0, 0, 0], [0, 129, ...Array(6).fill(0)]), 2 ** 24 - 127);
  assert.equal(at([most - 8, 1, 1, 1, 1, 1, 1, 1], [255, 129, 129, 129, 127, 127, 127, 255]), (most - 8) * 127 + 127);
  assert.ok(Object.is(at([-1, 1, 0, 0, 0, 0, 0, 0], all.fill(128)), 0), 'a sum of zeros is +0');
});

test('slot k is that of dim d and head h, channel c that of head and dim', () => {
  const q = [[129, 130, 131, 132, 133, 134]]; // 2 heads of 3 dims
  const order = Int32Array.from({ length: 36 }, (_, i) => Number(i % 7 === 0)); // channel c takes slot c
  assert.deepEqual(rows(q, { heads: 2, matrix: order }), [[1, 4, 2, 5, 3, 6]]);
  const first = Int32Array.from({ length: 36 }, (_, i) => (i < 6 ? 10 ** i : 0));
  assert.deepEqual(rows(q, { heads: 2, matrix: first })[0], [635_241, 0, 0, 0, 0, 0]);
});

test('each operation is rounded on its own (TRF-6)', () => {
  // In every line each of the first three roundings changes the last one's result.
  for (const [a, rowScale, scale, factor, mean, expected] of [
    [8_483_379, '3fc52cf3', '3fa42201', '3f76a4cf', 'c9fefd3d', '4b56793f'],
    [14_665_115, '3f748c24', '3fffd01f', '3f64aa14', '4ad50a35', '4bf40e62'],
    [9_660_774, '3f99758d', '3f235cb7', '3fb94be2', '4a0e11ef', '4b46c767'],
  ]) {
    // The parts of a number below 2^24 that one row makes of the integers 0 and 129.
    const matrix = [-Math.floor(a / 128), a % 128, 0, 0];
    const [[x]] = rows([[0, 129]], {
      matrix: Int32Array.from(matrix), scale: float(scale), factors: [float(factor)], rowScale: Float32Array.of(float(rowScale), 1),
      mean: Float32Array.of(float(mean), 0),
    });
    assert.equal(digits(x), expected, `${a}`);
  }
  assert.deepEqual(rows([[130], [130]], { factors: [0.5, 4] }), [[1], [8]], 'each token has its own');
});

test('powers of a rotation in binary64 (TRF-7)', () => {
  const pairs = [[0.6, 0.8], [5 / 13, 12 / 13]];
  for (const [position, ...expected] of [ // cosine and sine of each pair; those of a library differ from 2^24 + 257 on
    [0, '3f800000', '00000000', '3f800000', '00000000'], [1, '3f19999a', '3f4ccccd', '3ec4ec4f', '3f6c4ec5'],
    [5, 'bd9b5200', 'bf7f4342', '3f6b79ba', 'bec8defd'], [2 ** 24 + 257, '3f08aa5a', '3f5877e8', '3f7f8aa5', 'bd75043d'],
    [2 ** 32 + 1, 'bf3c53f2', '3f2d672e', 'bf109878', 'bf5340f9'], [2 ** 40 - 1, '3be758c3', 'bf80000b', 'bf6faa58', '3eb41ae6'],
  ]) {
    const [C, S] = turns(turn(pairs), position);
    assert.deepEqual([C[0], S[0], C[1], S[1]].map(digits), expected, `${position}`);
  }
});

test('pairs, positions and the roundings of a rotation (TRF-7)', () => {
  const q = [[129, 130, 132, 136]];
  const quarter = [[0, 1]]; // (a, b) becomes (-b, a)
  assert.deepEqual(rows(q, { pairs: quarter, firstPosition: 1 }), [[-2, 1, 4, 8]], 'dims from 2 n on are left alone');
  assert.deepEqual(rows(q, { pairs: [...quarter, ...quarter], firstPosition: 1 }), [[-4, -8, 1, 2]]);
  assert.deepEqual(rows(q, { pairs: [...quarter, ...quarter], firstPosition: 1, pairing: 'interleaved' }), [[-2, 1, -8, 4]]);
  const tokens = rows([q[0], q[0], q[0]], { pairs: quarter, firstPosition: 2 ** 34 });
  assert.deepEqual(tokens.map((row) => row.slice(0, 2)), [[1, 2], [-2, 1], [-1, -2]], 'the position follows the token');
  assert.deepEqual(rows(q, { heads: 2, pairs: quarter, firstPosition: 1 }), [[-4, 1, -8, 2]], 'each head by itself');
  for (const [a, b, u, v] of [['3f207e50', '3f5afa0b', '3edfb026', '3f7762d4'], ['3ef8d2f9', 'bf68a5d3', '3f29bfc0', 'bf49f63d']]) {
    const mean = Float32Array.of(float(a), float(b));
    assert.deepEqual(rows([[128, 128]], { mean, pairs: [[0.6, 0.8]], firstPosition: 7 })[0].map(digits), [u, v]);
  }
});

/** What decoding answers for an artifact that names a profile changed in one place. */
function withProfile({ late, object, header, json, tail = Buffer.alloc(0), artifact }) {
  const bytes = readFileSync(TINY_PROFILE);
  const M = Number(bytes.readBigUInt64LE(56));
  const manifest = JSON.parse(bytes.subarray(128, 128 + M));
  const data = Buffer.from(bytes.subarray(128 + M));
  const length = 8 * 8 + 16 * 2 + 4 * 64; // mean and row_scale of 8 channels, 2 pairs, a matrix of int32
  object?.(data.subarray(0, length));
  manifest.transforms[0].digest = hex(data.subarray(0, length));
  late?.(manifest);
  const text = Buffer.from(json?.(canonical(manifest)) ?? canonical(manifest));
  const head = Buffer.from(bytes.subarray(0, 128));
  [128 + text.length + data.length, text.length].forEach((n, i) => head.writeBigUInt64LE(BigInt(n), 48 + 8 * i));
  hash(text).copy(head, 72);
  header?.(head);
  seal(head);
  const [kvf, kvp, out] = ['tiny.kvf', 'tiny.kvp', 'tiny.out'].map((name) => join(temporary, name));
  const file = takeApart(TINY);
  file.manifest.profile.digest = hex(text);
  artifact?.(file.manifest);
  writeFileSync(kvf, putTogether(file));
  writeFileSync(kvp, Buffer.concat([head, text, data, tail]));
  const reply = cli('decode', kvf, '--track', TRACK, '--profile', kvp, '--output', out);
  rmSync(out, { force: true });
  return reply.code ?? 'ok';
}

test('profiles: what each fault is called', () => {
  const set = (pointer, value) => ({ late: (m) => {
    const keys = pointer.split('/');
    keys.slice(0, -1).reduce((o, k) => o[k], m)[keys.at(-1)] = value;
  } });
  const extension = (value, must = false) => set('extensions', { a: { must_understand: must, value } });
  const put = (at, bytes) => ({ object: (o) => { Buffer.from(bytes, 'hex').copy(o, at); } });
  for (const [code, name, change] of [
    ['ok', 'nothing', {}], ['ok', 'an extension', extension([1])], ['extension.unknown', 'needed', extension(1, true)],
    ['feature.unknown', 'feature', set('features', ['other', 'transform-klt'])],
    ['profile.content', 'no feature', set('features', [])], ['profile.content', 'no list', set('features', 'transform-klt')],
    ['profile.content', 'format', set('format', 'kvformat')], ['profile.content', 'heads', set('transforms/0/heads', 65_537)],
    ['profile.content', 'heads beyond', set('transforms/0/head_start', 1)], ['profile.content', 'depth', extension(JSON.parse('['.repeat(14) + ']'.repeat(14)))],
    ['profile.content', 'writer digest', set('writer/digest', '0'.repeat(64))], ['profile.content', 'data_bytes', set('data_bytes', 1)],
    ['profile.content', 'object digest', set('transforms/0/digest', '0'.repeat(64))],
    ['manifest.duplicate-key', 'key twice', { json: (t) => t.replace('{', '{"data_bytes":1,') }],
    ['manifest.canonical', 'space', { json: (t) => `${t} ` }], ['manifest.json', 'cut', { json: (t) => t.slice(0, -1) }],
    ['profile.content', '2^53', { json: (t) => t.replace('"layer":1', '"layer":9007199254740992') }],
    ['file.size', 'longer', { tail: Buffer.alloc(1) }], ['profile.content', 'tables', { header: (h) => { h[64] = 1; } }],
    ['profile.missing', 'version', { header: (h) => { h[10] = 10; } }], ['profile.missing', 'reserved', { header: (h) => { h[120] = 1; } }],
    ['profile.missing', 'magic', { header: (h) => { h[3] = 0x46; } }], ['profile.missing', 'another', { artifact: (m) => { m.profile.digest = '0'.repeat(64); } }],
    ['ok', 'row_scale 2^22', put(32, '0000804a')], ['profile.content', 'row_scale above', put(32, '0100804a')],
    ['ok', 'row_scale 2^-40', put(32, '0000802b')], ['profile.content', 'row_scale below', put(32, 'ffff7f2b')],
    ['profile.content', 'mean -0', put(0, '00000080')], ['ok', 'mean 2^-64', put(0, '0000801f')], ['ok', 'mean -2^96', put(0, '000080ef')],
    ['profile.content', 'another model', { artifact: (m) => { m.identity.model.id = 'b'; } }],
    ['ok', 'weights on one side', { artifact: (m) => { m.identity.model.weights_digest = `blake3:${'1'.repeat(64)}`; } }],
  ]) assert.equal(withProfile(change), code, name);
});

test('the row budget (PRF-4), at the limit and one above', () => {
  const row = (first) => ({ object: (o) => { for (let k = 0; k < 8; k++) o.writeInt32LE(k === 0 ? first : -1, 96 + 4 * k); } });
  assert.deepEqual([131_065, 131_066, -131_065, -(2 ** 31)].map((first) => withProfile(row(first))),
    ['ok', 'profile.content', 'ok', 'profile.content']);
});

test('artifacts with transformed groups: verified without a profile, and never decoded without it', async () => {
  const file = () => takeApart(TINY);
  assert.equal(await answer(putTogether(file())), 'ok');
  for (const [code, change] of [
    ['manifest.schema', (m) => { m.features = []; }], ['manifest.schema', (m) => { delete m.profile; }],
    ['manifest.schema', (m) => { m.features = []; delete m.profile; }], ['manifest.schema', (m) => { m.profile.url = 'x'; }],
    ['manifest.semantics', (m) => { m.features = ['transform-klt', 'transform-klt']; }],
    ['manifest.semantics', (m) => { m.qualities[0].encodings = ['quantised']; }],
    ['manifest.semantics', (m) => { m.segmentation.groups[0].heads = 1; }],
    ['feature.unknown', (m) => { m.features = ['external-sets', 'transform-klt']; }],
  ]) {
    const changed = file();
    change(changed.manifest);
    assert.equal(await answer(putTogether(changed)), code, change.toString());
  }
  for (const [name, at, bytes] of [['flags', 2, [1]], ['zero', 16 + 2 * 4, [127]]]) {
    const changed = file();
    Buffer.from(bytes).copy(changed.parts[0].records[0].object, at);
    assert.equal(await answer(putTogether(changed)), 'set.content', name);
  }
  const output = join(temporary, 'transformed');
  const reply = cli('decode', TINY, '--track', TRACK, '--output', output);
  assert.deepEqual([reply.status, reply.code], [69, 'profile.missing']);
  assert.match(reply.detail, new RegExp(file().manifest.profile.digest), 'the digest is named (TRF-4)');
  assert.match(cli('verify', TINY).detail, /TRF-5/, 'what was not checked (VER-3)');
  assert.equal(cli('decode', TINY, '--track', TRACK, '--profile', '/nowhere.kvp', '--output', output).code, 'io.not-found');
});

test('a part of a transformed group equals that part of the whole (PAR-1)', () => {
  const output = join(temporary, 'part-of-transformed');
  const read = (...selection) => {
    assert.equal(cli('decode', TINY, '--track', TRACK, '--profile', TINY_PROFILE, '--output', output, ...selection).code, null);
    const bytes = readFileSync(output);
    rmSync(output);
    return bytes;
  };
  const whole = read(); // [2, 3, 2, 4] of 2 bytes
  const head = (l, t, h) => whole.subarray(8 * ((l * 3 + t) * 2 + h), 8 * ((l * 3 + t) * 2 + h + 1));
  const part = read('--tokens', '1:3', '--layers', '3:4', '--heads', '1:2');
  assert.deepEqual(part, Buffer.concat([head(1, 1, 1), head(1, 2, 1)]));
});
