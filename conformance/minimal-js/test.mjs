// SPDX-License-Identifier: Apache-2.0
// node --test: the files of the specification, damaged in one place each, and the command line.
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import { available } from './codecs/hevc.mjs';
import { hash, hex, integerSum, sumWeight } from './digest.mjs';
import { narrow } from './quant.mjs';
import { HEVC, WORKED, answer, cli, expectCode, here, putTogether, seal, sources, takeApart, temporary } from './testing.mjs';

test('worked.kvf restores to the digests of Appendix A', () => {
  const appendix = readFileSync(here('../../spec/appendix-a.md'), 'utf8');
  const rows = [...appendix.matchAll(/^\| `([a-z-]+\/[a-z]+)` \| `(key|value)` \| `([0-9a-f]{64})` \|$/gm)];
  assert.equal(rows.length, 8);
  for (const [, track, group, digest] of rows) {
    const output = join(temporary, 'out');
    const reply = cli('decode', WORKED, '--track', track, '--output', output);
    assert.equal(reply.digests[group], digest);
    assert.equal(hex(readFileSync(output).subarray(group === 'key' ? 0 : 112, group === 'key' ? 112 : 224)), digest);
    rmSync(output);
  }
});

test('parts equal the same parts of the whole (PAR-1)', () => {
  const output = join(temporary, 'part');
  cli('decode', HEVC, '--track', 'near-lossless/zstd', '--output', output);
  const whole = readFileSync(output); // 2 groups [2, 20, 2, 8] of 2 bytes
  for (const track of available() ? ['near-lossless/zstd', 'near-lossless/hevc'] : ['near-lossless/zstd']) {
    rmSync(output);
    cli('decode', HEVC, '--track', track, '--output', output, '--tokens', '14:18', '--layers', '1:2', '--heads', '1:2');
    const rows = [0, 1].flatMap((g) => [14, 15, 16, 17].map((t) => {
      const at = (((g * 2 + 1) * 20 + t) * 2 + 1) * 16;
      return whole.subarray(at, at + 16);
    }));
    assert.deepEqual(readFileSync(output), Buffer.concat(rows), track);
  }
});

test('rounding to the dtypes (ARI-4)', () => {
  const bits = (x) => new Uint32Array(new Float32Array([x]).buffer)[0];
  const table = {
    float16: [[0, 0], [-0, 0x8000], [1, 0x3c00], [65504, 0x7bff], [65519, 0x7bff], [1e30, 0x7bff], [-1e30, 0xfbff],
      [2 ** -24, 1], [2 ** -25, 0], [-(2 ** -25), 0x8000], [1.5 * 2 ** -25, 1], [2 ** -25 * (1 + 2 ** -23), 1], [1.5 * 2 ** -24, 2],
      [2 ** -14, 0x400], [2 ** -14 - 2 ** -25, 0x400], [2 ** -14 - 2 ** -24, 0x3ff], [1 + 2 ** -11, 0x3c00], [1 + 3 * 2 ** -11, 0x3c02],
      [2047.5, 0x6800], [-1.966925, 0xbfde], [3.550778, 0x431a]],
    bfloat16: [[1, 0x3f80], [1 + 2 ** -8, 0x3f80], [1 + 3 * 2 ** -8, 0x3f82], [3.4028234e38, 0x7f7f], [-3.4028234e38, 0xff7f],
      [2 ** -149, 0], [2 ** -133, 1], [2 ** -134, 0], [-(2 ** -134), 0x8000], [2 ** -126, 0x80]],
    float8_e4m3fn: [[448, 0x7e], [464, 0x7e], [1e9, 0x7e], [-1e9, 0xfe], [1, 0x38], [1.0625, 0x38], [1.1875, 0x3a], [240, 0x77],
      [2 ** -9, 1], [2 ** -10, 0], [-(2 ** -10), 0x80], [3 * 2 ** -10, 2], [2 ** -6, 8], [2 ** -6 - 2 ** -10, 8], [17, 0x58], [19, 0x5a]],
    float8_e5m2: [[57344, 0x7b], [61440, 0x7b], [1, 0x3c], [1.125, 0x3c], [1.375, 0x3e], [2 ** -16, 1], [2 ** -17, 0], [3 * 2 ** -17, 2],
      [-(2 ** -16), 0x81], [2 ** -14, 4], [2 ** -14 - 2 ** -17, 4]],
  };
  for (const [dtype, rows] of Object.entries(table)) {
    for (const [value, expected] of rows) assert.equal(narrow(bits(value), dtype), expected, `${dtype} ${value}`);
  }
  // Every value of a narrow format comes back as itself.
  for (let code = 0; code < 0x7c00; code++) {
    const e = code >> 10;
    const x = e === 0 ? code * 2 ** -24 : (1024 + (code & 1023)) * 2 ** (e - 25);
    assert.equal(narrow(bits(x), 'float16'), code);
    assert.equal(narrow(bits(-x), 'float16'), code + 0x8000);
  }
});

test('the sum of the integers (INT-3)', () => {
  const appendix = readFileSync(here('../../spec/appendix-a.md'), 'utf8');
  const example = Buffer.from(appendix.match(/^### A\.5\.5[^]*?```\n([0-9a-f]+)\n```/m)[1], 'hex');
  const stated = appendix.match(/^sum ([0-9,]+)\. In track/m)[1].replaceAll(',', '');
  assert.equal(example.length, 56);
  assert.equal(integerSum(example), BigInt(stated));
  assert.deepEqual([0, 1, 4096].map(sumWeight), [1, 2_654_356_959, 2_006_712_119]);
  const h = (n) => { const z = (2_654_435_761n * BigInt(n)) % 2n ** 32n; return (z ^ (z / 2n ** 15n)) | 1n; };
  for (const length of [0, 1, 4095, 4096, 4097, 3 * 4096 + 5]) {
    for (const value of [() => 255, (i) => (i * 7919) % 256]) {
      const q = Uint8Array.from({ length }, (_, i) => value(i));
      const terms = Array.from(q, (x, i) => BigInt(x) * h(i % 4096) * h(4096 + Math.floor(i / 4096)));
      assert.equal(integerSum(q), terms.reduce((a, b) => a + b, 0n) % 2n ** 64n, `${length}`);
    }
  }
  assert.equal(sumWeight(4096 + 65535), Number(h(4096 + 65535)), 'the last row of a segment of 256 MiB');
});

test('the unchanged files, taken apart and put together', async () => {
  assert.deepEqual(putTogether(takeApart(WORKED)), sources.worked);
  assert.equal(await answer(sources.worked), 'ok');
  await expectCode('ok', 'alignment 4096', (m) => { m.segmentation.alignment = 4096; });
  if (available()) assert.equal(await answer(sources.hevc), 'ok');
});

test('each byte of the header is covered', async () => {
  for (let at = 0; at < 128; at++) {
    const file = Buffer.from(sources.worked);
    file[at] ^= 1;
    const code = at < 8 ? 'header.magic' : at === 14 || at === 15 ? 'header.field' : 'header.check';
    assert.equal(await answer(file), code, `byte ${at}`);
  }
});

test('header fields, with the check made anew', async () => {
  const cases = [
    ['version.unknown', 'major', (h) => h.writeUInt16LE(1, 8)],
    ['version.unknown', 'minor before reserved', (h) => { h.writeUInt16LE(10, 10); h[110] = 1; }],
    ['header.field', 'reserved', (h) => { h[127] = 1; }],
    ['limit.exceeded', 'file_bytes', (h) => h.writeBigUInt64LE(2n ** 53n, 48)],
    ['limit.exceeded', 'manifest_bytes', (h) => h.writeBigUInt64LE(16777217n, 56)],
    ['header.field', 'tables_bytes', (h) => h.writeBigUInt64LE(2n ** 53n - 1n, 64)],
    ['header.field', 'tables_bytes small', (h) => h.writeBigUInt64LE(1151n, 64)],
    ['file.size', 'file_bytes plus 1', (h) => h.writeBigUInt64LE(5515n, 48)],
    ['manifest.digest', 'manifest_digest', (h) => { h[72] ^= 1; }],
    ['manifest.digest', 'manifest_bytes less 1', (h) => h.writeBigUInt64LE(2704n, 56)],
  ];
  for (const [code, name, header] of cases) await expectCode(code, name, null, { header });
  // A longer header of a later version has its check over all of it, and is unsupported rather than damaged.
  const later = Buffer.concat([sources.worked.subarray(0, 128), Buffer.alloc(72), sources.worked.subarray(128)]);
  later.writeUInt32LE(200, 12);
  later.writeUInt16LE(10, 10);
  hash(Buffer.concat([later.subarray(0, 16), later.subarray(48, 200)])).copy(later, 16);
  assert.equal(await answer(later, 'later version'), 'version.unknown');
  for (const [bytes, code] of [[127, 'header.field'], [4097, 'header.field'], [200, 'header.check']]) {
    const file = Buffer.from(sources.worked);
    file.writeUInt32LE(bytes, 12);
    seal(file);
    assert.equal(await answer(file, `header_bytes ${bytes}`), code);
  }
  const damaged = Buffer.from(sources.worked);
  damaged.writeUInt16LE(10, 10);
  assert.equal(await answer(damaged, 'version and check'), 'header.check');
});

test('truncations and an extra byte', async () => {
  for (const length of [0, 7, 8, 47, 48, 127, 128, 129, 2832, 2833, 3984, 3985, 5513]) {
    assert.equal(await answer(sources.worked.subarray(0, length), `length ${length}`), length < 8 ? 'header.magic' : 'file.size', `${length}`);
  }
  assert.equal(await answer(Buffer.concat([sources.worked, Buffer.alloc(1)]), 'longer'), 'file.size');
});

test('JSON', async () => {
  const inGenerator = (text) => (json) => json.replace('"kvformat-python 0.9.0"', `"${text}"`);
  const inExtension = (text) => (json) => json.replace('"extensions":{}', `"extensions":{"a.b":{"must_understand":false,"value":${text}}}`);
  const nested = (depth) => '['.repeat(depth) + ']'.repeat(depth);
  const cases = [
    ['ok', inExtension('{"1":1,"_":1,"constructor":[],"x":null}'.replace('"_":1,', ''))],
    ['manifest.json', inExtension('{"_":1}')],
    ['manifest.json', inExtension('{"__proto__":1}')],
    ['manifest.json', inExtension('{"":1}')],
    ['manifest.json', inExtension(`{"${'a'.repeat(65)}":1}`)],
    ['ok', inExtension(`{"${'a'.repeat(64)}":1}`)],
    ['manifest.canonical', inExtension('{"b":1,"a":1}')],
    ['manifest.canonical', inExtension('[1, 2]')],
    ['manifest.canonical', (json) => `${json}\n`],
    ['manifest.canonical', (json) => json.replace('"format":', '"\\u0066ormat":')],
    ['manifest.duplicate-key', inExtension('{"a":1,"a":1}')],
    ['manifest.duplicate-key', (json) => json.replace('"format":', '"\\u0066ormat":"kvformat","format":')],
    ['manifest.json', inExtension('-1')], ['manifest.json', inExtension('-0')], ['manifest.json', inExtension('1.0')],
    ['manifest.json', inExtension('1e2')], ['manifest.json', inExtension('01')], ['manifest.json', inExtension('NaN')],
    ['manifest.json', inExtension('[1,]')], ['manifest.json', inExtension('{"a":1,}')], ['manifest.json', inExtension('tru')],
    ['manifest.json', inExtension("'a'")], ['manifest.json', inExtension('+1')], ['manifest.json', inExtension('')],
    ['ok', inExtension('9007199254740991')],
    ['limit.exceeded', inExtension('9007199254740992')], ['limit.exceeded', inExtension('9'.repeat(400))],
    ['ok', (json) => inExtension(`[${'0,'.repeat(1_048_576 - 4 - json.match(/[,[{]/g).length)}0]`)(json)],
    ['limit.exceeded', (json) => inExtension(`[${'0,'.repeat(1_048_576 - 3 - json.match(/[,[{]/g).length)}0]`)(json)],
    ['ok', inExtension(nested(13))], ['limit.exceeded', inExtension(nested(14))], ['limit.exceeded', inExtension('['.repeat(100_000))],
    ['ok', inExtension(`"${'x'.repeat(4096)}"`)], ['limit.exceeded', inExtension(`"${'x'.repeat(4097)}"`)],
    ['limit.exceeded', inExtension(`"${'\u00e9'.repeat(2049)}"`)],
    ['ok', inExtension('"\\u0000\\u001f\\b\\t\\n\\f\\r\\"\\\\\u007f\u2028\u{1f600}/"')],
    ['manifest.canonical', inExtension('"\\u001F"')], ['manifest.canonical', inExtension('"\\u0008"')],
    ['manifest.canonical', inExtension('"\\/"')], ['manifest.canonical', inExtension('"\\u00e9"')],
    ['manifest.json', inExtension('"\\ud800"')], ['manifest.canonical', inExtension('"\\ud83d\\ude00"')],
    ['manifest.json', inExtension('"\\ude00\\ud83d"')], ['manifest.json', inExtension('"\\ud83d\\u0041"')],
    ['manifest.json', inExtension('"\\x41"')], ['manifest.json', inExtension('"a\tb"')], ['manifest.json', inExtension('"\\u12"')],
    ['manifest.json', (json) => `\ufeff${json}`], ['manifest.json', (json) => `${json}{}`], ['manifest.json', () => '[]'],
    ['manifest.json', () => ''], ['manifest.json', () => '{'], ['manifest.json', (json) => json.slice(0, -1)],
    ['manifest.json', (json) => Buffer.concat([Buffer.from(json.slice(0, -1)), Buffer.from([0xff, 0x7d])])],
    ['manifest.json', (json) => Buffer.from(json.replace('kvformat-python', 'kv\u00e9'), 'latin1')],
    ['manifest.schema', inGenerator('')], ['manifest.schema', inGenerator('x'.repeat(1025))],
    ['manifest.schema', inGenerator('\u00e9'.repeat(513))], ['ok', inGenerator('\u00e9'.repeat(512))],
  ];
  for (const [i, [code, json]] of cases.entries()) await expectCode(code, `json ${i}`, null, { json });
});

test('manifest: features, extensions, schema', async () => {
  const set = (path, value) => (m) => ({
    late: () => {
      const keys = path.split('/');
      const target = keys.slice(0, -1).reduce((o, k) => o[k], m);
      if (value === undefined) delete target[keys.at(-1)];
      else target[keys.at(-1)] = value;
    },
  });
  const cases = [
    ['feature.unknown', 'features', ['external-sets']], ['feature.unknown', 'features', ['No Name']],
    ['manifest.schema', 'features', [1]], ['manifest.schema', 'features', undefined], ['manifest.schema', 'features', {}],
    ['extension.unknown', 'extensions/signature', { must_understand: true, value: 1 }],
    ['extension.unknown', 'extensions/a', { must_understand: true }],
    ['ok', 'extensions/a', { must_understand: false, value: { b: [null] } }],
    ['manifest.schema', 'extensions/a', { must_understand: 1, value: 1 }], ['manifest.schema', 'extensions/a', { must_understand: false }],
    ['manifest.schema', 'extensions/a', 1], ['manifest.schema', 'extensions', []],
    ['manifest.schema', 'format', 'kvformat2'], ['manifest.schema', 'version', '0.8'], ['manifest.schema', 'unknown', 1],
    ['manifest.schema', 'lineage', undefined], ['manifest.schema', 'source_digest', 'A'.repeat(64)],
    ['manifest.schema', 'source_digest', null], ['manifest.schema', 'data_bytes', true], ['manifest.schema', 'groups', []],
    ['limit.exceeded', 'identity/layers_total', 65537], ['manifest.schema', 'identity/layers_total', 0],
    ['manifest.schema', 'identity/kind', 'none'], ['manifest.schema', 'identity/cache_dtype', 'a b'],
    ['manifest.schema', 'identity/cache_dtype', 'float16\n'], ['manifest.schema', 'identity/model/weights_digest', 'md5:00'],
    ['manifest.schema', 'identity/rope/0/inv_freq', ''], ['manifest.schema', 'identity/rope/0/inv_freq', '3f80000'],
    ['manifest.schema', 'identity/rope/0/inv_freq', '80000000'], ['manifest.schema', 'identity/rope/0/inv_freq', '7f800000'],
    ['ok-chain', 'identity/rope/0/inv_freq', '00000000'], ['manifest.schema', 'identity/rope/0/keys_rotated', 1],
    ['manifest.schema', 'identity/rope/0/scaling', '0000000000000000'], ['manifest.schema', 'identity/rope/0/scaling', '7ff0000000000000'],
    ['manifest.schema', 'identity/rope/0/scaling', 'bff0000000000000'], ['manifest.schema', 'identity/rope/0/scaling', '7FF0000000000000'],
    ['manifest.semantics', 'identity/rope/0/layers', [1, 0]], ['manifest.semantics', 'identity/rope/0/layers', [0, 2]],
    ['manifest.semantics', 'identity/engine_key', { engine: 'e', engine_version: null, hash_algorithm: 'h', key: 'k', rank: 0, world_size: 1 }],
    ['manifest.semantics', 'identity/kind', 'unbound'], ['manifest.semantics', 'tokens/chain', null],
    ['manifest.semantics', 'identity/scale_scheme', { name: 'x', scales: [{ bits: '3f800000', layer: 2, role: 'key' }] }],
    ['manifest.schema', 'identity/scale_scheme', { name: 'x', scales: [{ bits: '80000000', layer: 0, role: 'key' }] }],
    ['manifest.schema', 'lineage', { kind: 'lossy', generations: 0, profile: null, quality: 'high' }],
    ['ok', 'lineage', { kind: 'lossy', generations: 1, profile: null, quality: 'high' }],
    ['manifest.schema', 'lineage', { kind: 'exact', generations: 1 }],
    ['manifest.schema', 'groups/0/dtype', 'int8'], ['limit.exceeded', 'groups/0/head_dim', 65537], ['manifest.schema', 'groups/0/heads', 0],
    ['manifest.schema', 'groups/0/heads_total', 0], ['limit.exceeded', 'groups/0/heads_total', 65537],
    ['manifest.semantics', 'groups/0/head_start', 1], ['manifest.semantics', 'groups/0/layers', [1, 0]],
    ['manifest.semantics', 'groups/0/layers', [0, 2]], ['manifest.semantics', 'groups/0/role', 'value'],
    ['manifest.semantics', 'groups/0/name', 'value'], ['manifest.schema', 'groups/0/tokens', { kind: 'none' }],
    ['limit.exceeded', 'groups/0/layers', Array.from({ length: 4097 }, (_, i) => i)],
    ['manifest.semantics', 'groups/0/tokens', { kind: 'window', held_start: 8, cumulative_tokens: 7 }],
    ['manifest.semantics', 'groups/0/tokens', { kind: 'state', shape: [5] }],
    ['manifest.schema', 'groups/0/tokens', { kind: 'state', shape: [] }], ['manifest.semantics', 'valid_lengths', [7]],
    ['manifest.schema', 'segmentation/alignment', 2], ['manifest.schema', 'segmentation/tokens', 0],
    ['limit.exceeded', 'segmentation/tokens', 65537], ['limit.exceeded', 'segmentation/groups/0/layers', 4],
    ['limit.exceeded', 'groups/0/heads', 65537], ['limit.exceeded', 'segmentation/groups/0/heads', 65537],
    ['limit.exceeded', 'valid_lengths', [2 ** 40 + 1]],
    ['manifest.schema', 'segmentation/groups/0/layers', 0], ['manifest.semantics', 'segmentation/groups/0/heads', 2],
    ['manifest.semantics', 'segmentation/groups', [{ heads: 1, layers: 2 }]], ['manifest.semantics', 'segmentation/tokens', 1],
    ['manifest.semantics', 'tokens/count', 2 ** 40], ['limit.exceeded', 'tokens/count', 2 ** 40 + 1],
    ['limit.exceeded', 'tokens/first_position', 2 ** 40], ['manifest.semantics', 'tokens/first_position', 256],
    ['manifest.semantics', 'tokens/chain/hashes', []], ['manifest.schema', 'tokens/chain/block_tokens', 128],
    ['manifest.semantics', 'tokens/content', [{ count: 8, digest: null, kind: 'image', start: 0 }]],
    ['manifest.schema', 'tokens/content', [{ count: 0, digest: null, kind: 'image', start: 0 }]],
    ['manifest.semantics', 'qualities/0/encodings', ['quantised']], ['manifest.semantics', 'qualities/0/encodings', ['exact', 'exact']],
    ['manifest.semantics', 'qualities/1/relative_step', '3fd1eb851eb851ec'], ['manifest.semantics', 'qualities/1/name', 'near-lossless'],
    ['manifest.semantics', 'qualities/0/data_stop', 401], ['manifest.semantics', 'qualities/0/data_start', 1],
    ['limit.exceeded', 'qualities/0/sets', 65537], ['header.field', 'qualities/0/sets', 3],
    ['manifest.semantics', 'tracks/0/quality', 'none'], ['manifest.semantics', 'tracks/0/name', 'near-lossless/stored'],
    ['manifest.schema', 'tracks/0/codecs', ['zstd', 'av1']], ['manifest.semantics', 'tracks/0/codecs', ['zstd']],
    ['manifest.semantics', 'tracks/2/codecs', ['zstd', 'hevc']], ['manifest.semantics', 'tracks/0/segments', 3],
    ['limit.exceeded', 'tracks/0/segments', 1048577], ['manifest.semantics', 'data_bytes', 1528],
    ['manifest.semantics', 'tracks/0/layouts',
      [{ fold: [1, 1], frames: 1, grid: [1, 1], height: 144, order: 'time', tile: [1, 1], width: 144 }]],
  ];
  for (const [code, path, value] of cases) {
    const change = set(path, value);
    await expectCode(code.split('-')[0] === 'ok' ? 'ok' : code, `${path} ${JSON.stringify(value)?.slice(0, 40)}`, change);
  }
  await expectCode('limit.exceeded', 'more cells than a track may have', set('tokens/count', 2 ** 40), {}, HEVC);
  await expectCode('manifest.semantics', 'content_id', (m) => { m.content_id = '0'.repeat(64); }, { keepContentId: true });
  const layout = (member, value) => (m) => { m.tracks[0].layouts[0][member] = value; };
  for (const [code, ...args] of [['limit.exceeded', 'width', 8193], ['manifest.schema', 'width', 150], ['manifest.schema', 'height', 128],
    ['limit.exceeded', 'frames', 65537], ['manifest.schema', 'fold', [0, 1]], ['manifest.semantics', 'grid', [145, 9]],
    ['manifest.schema', 'fold', [1]], ['limit.exceeded', 'frames', 65536], ['manifest.semantics', 'tile', [2 ** 53 - 1, 2 ** 53 - 1]],
    ['table.record', 'grid', [1, 9]], ['table.record', 'tile', [1, 15]]]) {
    await expectCode(code, `layout ${args}`, layout(...args), {}, HEVC);
  }
  await expectCode('manifest.semantics', 'layout twice', (m) => { m.tracks[0].layouts.push(m.tracks[0].layouts[0]); }, {}, HEVC);
  await expectCode('table.record', 'layout unused', (m) => {
    m.tracks[0].layouts.push({ ...m.tracks[0].layouts[0], width: 160 });
  }, {}, HEVC);
});

test('tables, padding, sets', async () => {
  const poke = (part, n, at, bytes = [1]) => (m, parts) => {
    const { record } = parts[part].records[n];
    bytes.forEach((b, i) => { record[at + i] ^= b; });
  };
  for (const [part, n, at, options] of [[0, 0, 54], [0, 0, 48], [0, 1, 48], [0, 0, 50], [0, 0, 52], [0, 0, 0, { keepOffsets: true }],
    [0, 0, 8, { keepLengths: true }], [2, 0, 0, { keepOffsets: true }], [2, 0, 15, { keepLengths: true }], [2, 0, 20], [2, 0, 24], [2, 0, 32],
    [2, 0, 36], [2, 0, 38], [2, 0, 40], [2, 0, 42], [2, 0, 44], [2, 0, 48], [2, 0, 52], [2, 0, 55], [4, 0, 16], [4, 0, 20], [3, 0, 96], [5, 1, 96]]) {
    const code = at === 15 ? 'limit.exceeded' : 'table.record';
    await expectCode(code, `record ${part} ${n} ${at}`, poke(part, n, at), options);
  }
  await expectCode('limit.exceeded', 'side_bytes', poke(2, 0, 19, [0x11]));
  await expectCode('table.digest', 'set table', poke(0, 0, 60), { keepTableDigests: true });
  await expectCode('table.digest', 'segment table', poke(3, 0, 60), { keepTableDigests: true });
  for (const part of [2, 3]) { // one track of a quality: nothing compares the sums of two tracks but the integers
    for (const at of [56, 63]) await expectCode('segment.integers', `integer sum ${part} ${at}`, poke(part, 0, at, [0x80]));
  }
  await expectCode('segment.integers', 'integer sum of an exact group', poke(5, 1, 60));
  await expectCode('segment.integers', 'integer digest', (m, parts) => { for (const p of [2, 3]) parts[p].records[0].record[96] ^= 1; });
  await expectCode('data.padding', 'padding', (m) => { m.segmentation.alignment = 4096; }, { gapByte: 1 });
  for (const [opened, extension] of [['data.padding', {}], ['ok', { a: { must_understand: false, value: Array(70).fill('x'.repeat(4096)) } }]]) {
    const file = takeApart(WORKED); // without and with a front above 262,144 bytes (HDR-9)
    file.manifest.segmentation.alignment = 4096;
    file.manifest.extensions = extension;
    const path = join(temporary, 'padding.kvf');
    writeFileSync(path, putTogether(file, { gapByte: 1 }));
    const [inspected, verified] = [cli('inspect', path), cli('verify', path)];
    assert.deepEqual([inspected.code ?? 'ok', verified.code], [opened, 'data.padding']);
    rmSync(path);
  }
  await expectCode('data.source', 'source', (m) => { m.source_digest = '0'.repeat(64); });
  const object = (part, n, change) => (m, parts) => {
    const r = parts[part].records[n];
    r.object = change(r.object) ?? r.object;
  };
  const set = (at, ...bytes) => object(0, 0, (b) => { Buffer.from(bytes).copy(b, at); });
  await expectCode('set.digest', 'set digest', set(16, 1), { keepDigests: true });
  for (const [at, ...bytes] of [[0, 1], [2, 28], [2, 8], [4, 2], [8, 5], [12, 32], [14, 1], [16, 0, 0, 0, 0], [16, 0, 0, 0x80, 0x7f], [16, 0, 0, 0xc0, 0x7f],
    [16, 0, 0, 0x80, 0xbf], [16, 1, 0, 0x80, 0x53], [28, 0, 0, 0, 0x80], [28, 1, 0, 0, 0], [28, 0, 0, 0xc0, 0x7f], [28, 0, 0, 0x80, 0x70],
    [60, 2], [60, 4], [68, 0, 0, 0, 0]]) {
    await expectCode('set.content', `set ${at} ${bytes}`, set(at, ...bytes));
  }
  await expectCode('limit.exceeded', 'token scales', set(12, 1, 1));
  await expectCode('set.content', 'longer set', object(0, 0, (b) => Buffer.concat([b, Buffer.alloc(4)])));
});

test('segments: side blocks, stored, zstd', async () => {
  /** Change the side block in both tracks alike. */
  const side = (at, ...bytes) => (m, parts) => {
    for (const p of [2, 3]) Buffer.from(bytes).copy(parts[p].records[0].object, at);
  };
  const object = (part, change, n = 0) => (m, parts) => {
    const r = parts[part].records[n];
    r.object = change(r.object) ?? r.object;
  };
  await expectCode('segment.digest', 'segment digest', object(2, (b) => { b[0] ^= 1; }), { keepDigests: true });
  for (const [at, ...bytes] of [[4, 33], [0, 1], [14, 5], [14, 3], [14, 0, 0, 0, 255], [18, 1], [18, 7], [22, 0], [30, 6], [34, 0, 0x7c], [34, 0, 0x7e]]) {
    await expectCode('segment.side', `side ${at} ${bytes}`, side(at, ...bytes));
  }
  await expectCode('segment.side', 'side differs', object(3, (b) => { b[34] ^= 1; }));
  await expectCode('segment.side', 'patched integer', (m, parts) => {
    const r = parts[3].records[0];
    r.object[118] ^= 1;
    r.record.set(hash(r.object.subarray(118)), 96);
    r.record.writeBigUInt64LE(integerSum(r.object.subarray(118)), 56);
    parts.splice(2, 1); // without the other track
    m.tracks.splice(0, 1);
  });
  await expectCode('segment.payload', 'stored longer', object(3, (b) => Buffer.concat([b, Buffer.alloc(1)])));
  await expectCode('segment.payload', 'stored shorter', object(3, (b) => b.subarray(0, b.length - 1)));
  await expectCode('segment.integers', 'stored other', object(3, (b) => { b[b.length - 1] ^= 1; }));
  const zstd = (change) => object(2, (b) => {
    const payload = change(Buffer.from(b.subarray(118)));
    return Buffer.concat([b.subarray(0, 118), payload]);
  });
  const put = (at, ...bytes) => (p) => { Buffer.from(bytes).copy(p, at); return p; };
  for (const [name, change] of Object.entries({
    'no frame': put(0, 0), 'two frames': put(0, 2), 'many frames': put(0, 255, 255, 255, 255), 'no rows': put(4, 0), 'fewer rows': put(4, 7),
    'more rows': put(4, 9), 'frame short': put(8, 64), 'frame long': put(8, 66), low: put(12, 1), 'radix 17': put(13, 16), 'radix 16': put(13, 15),
    magic: put(14, 0x50), 'no size': put(18, 0), checksum: put(18, 0x24), dictionary: put(18, 0x21), unused: put(18, 0x30), reserved: put(18, 0x28),
    size: put(19, 55), 'block size': put(20, 0xc9), 'not last': put(20, 0xc0), 'reserved block': put(20, 0xc7),
    'more bytes': (p) => Buffer.concat([p, Buffer.alloc(1)]), 'ends early': (p) => p.subarray(0, 3),
    'skippable frame behind': (p) => { p.writeUInt32LE(65 + 8, 8); return Buffer.concat([p, Buffer.from('502a4d1800000000', 'hex')]); },
    window: (p) => { // not single segment, window descriptor of 16 MiB
      p.writeUInt32LE(67, 8);
      return Buffer.concat([p.subarray(0, 18), Buffer.from([0x40, 14 << 3, 0, 0]), p.subarray(20)]);
    },
  })) await expectCode('segment.payload', `zstd ${name}`, zstd(change));
  // Raw blocks of our own: radix 2 with low 127 cannot hold these values, but shows digits behind the last token.
  const frame = (content) => Buffer.concat([Buffer.from([0x28, 0xb5, 0x2f, 0xfd, 0x20, content.length]),
    Buffer.from([1 | content.length << 3, content.length >> 5, 0]), content]);
  const payload = (low, radix, content) => {
    const head = Buffer.from([1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, low, radix - 1]);
    const body = frame(Buffer.from(content));
    head.writeUInt32LE(body.length, 8);
    return Buffer.concat([head, body]);
  };
  for (const [code, name, bytes] of [
    ['segment.payload', 'digit behind the last token', payload(128, 2, Array(8).fill(0x80))],
    ['segment.integers', 'radix 2', payload(127, 2, Array(8).fill(0x7f))],
    ['segment.payload', 'byte above radix^p', payload(128, 3, Array(16).fill(243))],
    ['segment.payload', 'radix 1', payload(128, 1, Array(8).fill(1))],
    ['segment.payload', 'window of single segment', payload(128, 16, Array(32).fill(0)).fill(0xa0, 18, 19)],
  ]) await expectCode(code, `zstd ${name}`, zstd(() => bytes));
});

test('hevc', { skip: !available() && 'no ffmpeg' }, async () => {
  const UNITS = /\0\0\0?\x01/g;
  const stream = (change) => (m, parts) => {
    const r = parts[1].records[0];
    const side = r.record.readUInt32LE(16);
    const units = r.object.subarray(side).toString('latin1').split(UNITS).slice(1).map((u) => Buffer.from(u, 'latin1'));
    const changed = change(units) ?? units;
    const bytes = Buffer.isBuffer(changed) ? changed : Buffer.concat(changed.flatMap((u) => [Buffer.from([0, 0, 0, 1]), u]));
    r.object = Buffer.concat([r.object.subarray(0, side), bytes]);
  };
  const join = (units) => Buffer.concat(units.flatMap((u) => [Buffer.from([0, 0, 1]), u]));
  await expectCode('ok', 'start codes of 4 bytes', stream((u) => u), {}, HEVC);
  await expectCode('ok', 'start codes of 3 bytes', stream((u) => join(u)), {}, HEVC);
  for (const [name, change] of Object.entries({
    'zero in front': (u) => Buffer.concat([Buffer.from([0, 0]), join(u)]), 'zero behind': (u) => Buffer.concat([join(u), Buffer.alloc(1)]),
    'byte in front': (u) => Buffer.concat([Buffer.from([9]), join(u)]), 'no VPS': (u) => u.slice(1), 'SPS twice': (u) => [u[0], u[1], u[1], ...u.slice(2)],
    'no SEI': (u) => u.slice(0, -1), 'SEI twice': (u) => [...u, u.at(-1)], 'picture twice': (u) => [...u, ...u.slice(3)], 'no picture': (u) => u.slice(0, 3),
    'prefix SEI': (u) => { u.at(-1)[0] = 39 << 1; }, 'layer id': (u) => { u[3][1] |= 8; }, 'temporal id': (u) => { u[3][1] = 2; },
    'trailing picture first': (u) => { u[3][0] = 1 << 1; }, 'CRA picture': (u) => { u[3][0] = 21 << 1; }, 'access unit delimiter': (u) => [Buffer.from([70, 1, 80]), ...u],
    'many units': (u) => [...u.slice(0, 3), ...Array(66).fill(u[3]), u.at(-1)],
    'profile': (u) => { u[1][3] = (u[1][3] & 0xe0) | 1; }, 'hash type': (u) => { u.at(-1)[4] = 1; }, 'payload type': (u) => { u.at(-1)[2] = 5; },
    'cut slice': (u) => { u[3] = u[3].subarray(0, u[3].length >> 1); }, 'MD5': (u) => { u.at(-1)[10] ^= 1; },
    'slice data': (u) => { u[3][u[3].length >> 1] ^= 0x10; }, 'empty': () => Buffer.from([0]),
  })) await expectCode('segment.bitstream', `hevc ${name}`, stream(change), {}, HEVC);
});

test('no damage of a single byte passes', async () => {
  for (let at = 128; at < sources.worked.length; at += 37) {
    const file = Buffer.from(sources.worked);
    file[at] ^= 0x41;
    assert.match(await answer(file), /^(manifest|table|set|segment)\.digest$/);
  }
});

test('command line: answers and exit codes', async () => {
  const out = join(temporary, 'cli-out');
  const ids = join(temporary, 'ids.json');
  const salt = join(temporary, 'salt');
  writeFileSync(ids, JSON.stringify([0, 1, 2, 3, 4, 5, 6].map((t) => 5 + 1000 * t)));
  writeFileSync(salt, 'x');
  const other = join(temporary, 'other.json');
  writeFileSync(other, '[1,2,3,4,5,6,7]');
  const decode = ['decode', WORKED, '--track', 'exact/zstd', '--output', out];
  const content = join(temporary, 'content.json');
  const placed = join(temporary, 'placed.json');
  const illegal = join(temporary, 'illegal.json');
  writeFileSync(content, JSON.stringify([{ count: 2, digest: null, kind: 'image', start: 7 }]));
  writeFileSync(placed, JSON.stringify([0, 1, 2, 3, 4, 5, 6].map((t) => 5 + 1000 * t).concat(-1, 2 ** 40)));
  writeFileSync(illegal, JSON.stringify([0, 1, 2, 3, 4, 5, 6].map((t) => 5 + 1000 * t).concat(-1, 2 ** 40, -1)));
  for (const [status, code, ...args] of [
    [0, null, 'verify', WORKED, '--expect-token-ids', placed, '--expect-content', content],
    [64, 'usage.argument', 'verify', WORKED, '--expect-token-ids', placed],
    [64, 'usage.argument', 'verify', WORKED, '--expect-token-ids', illegal, '--expect-content', content],
    [64, 'usage.argument'], [64, 'usage.argument', 'unknown'], [64, 'usage.argument', 'verify'], [64, 'usage.argument', 'verify', WORKED, '--what'],
    [64, 'usage.argument', 'decode', WORKED], [64, 'usage.selection', 'decode', WORKED, '--track', 'exact/hevc', '--output', out],
    [64, 'usage.argument', ...decode, '--tokens', '3'], [64, 'usage.selection', ...decode, '--tokens', '0:8'],
    [64, 'usage.selection', ...decode, '--layers', '1:3'], [64, 'usage.selection', ...decode, '--heads', '1:2'],
    [74, 'io.not-found', 'verify', '/nowhere/file.kvf'], [74, 'io.read', 'verify', temporary],
    [74, 'io.write', ...decode.slice(0, -1), '/nowhere/out'],
    [65, 'header.magic', 'inspect', here('kvf.mjs')], [76, 'identity.field', 'verify', WORKED, '--expect-model', 'm'],
    [76, 'identity.tokens', 'verify', WORKED, '--expect-token-ids', other], [76, 'identity.tokens', ...decode, '--expect-token-ids', other],
    [76, 'identity.tokens', ...decode, '--expect-token-ids', ids, '--salt-file', salt], [64, 'usage.argument', ...decode, '--salt-file', salt],
    [76, 'identity.missing', 'verify', HEVC, '--expect-token-ids', ids],
    [0, null, 'verify', WORKED, '--expect-token-ids', ids, '--expect-model', 'example/two-layers'],
    [0, null, ...decode, '--expect-token-ids', ids], [74, 'io.exists', ...decode],
  ]) {
    const reply = cli(...args);
    assert.deepEqual([reply.status, reply.code, reply.protocol], [status, code, 1], args.join(' '));
  }
  const before = readdirSync(temporary).length;
  const bad = join(temporary, 'bad.kvf');
  const file = Buffer.from(sources.worked);
  file[file.length - 1] ^= 1;
  writeFileSync(bad, file);
  assert.equal(cli('decode', bad, '--track', 'exact/stored', '--output', `${out}2`).code, 'segment.digest');
  assert.equal(readdirSync(temporary).length, before + 1, 'no output is left behind (ERR-4)');
  const { name, batch, formats } = cli('info');
  assert.deepEqual([name, batch, formats], ['minimal-js', true, ['0.9']]);
});

test('command line: batch', () => {
  const out = join(temporary, 'batch-out');
  const calls = [
    ['verify', WORKED], ['verify', '/nowhere/file.kvf'], ['decode', WORKED, '--track', 'exact/zstd', '--output', out],
    'info', [1], ['batch'], ['inspect', WORKED],
  ];
  const input = calls.map((call) => `${JSON.stringify(call)}\n`).join('');
  const { status, stdout } = spawnSync(process.execPath, [here('kvf.mjs'), 'batch'], { encoding: 'utf8', input: `${input}no JSON\n` });
  const answers = stdout.trimEnd().split('\n').map((line) => JSON.parse(line));
  assert.equal(status, 0);
  assert.deepEqual(answers.map((a) => a.exit), [0, 74, 0, 64, 64, 64, 0, 64]);
  assert.deepEqual(answers.map((a) => a.verdict), ['ok', 'io_error', 'ok', 'usage', 'usage', 'usage', 'ok', 'usage']);
  const { exit, ...answer } = answers[0];
  const { status: alone, stderr, ...same } = cli('verify', WORKED);
  assert.deepEqual([answer, exit, stderr], [same, alone, '']);
});
