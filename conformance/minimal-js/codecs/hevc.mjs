// SPDX-License-Identifier: Apache-2.0
// Section 10.4. Decoding runs in an ffmpeg process of its own with limits on memory, time and output (VER-4).
import { spawn, spawnSync } from 'node:child_process';
import { Failure, check } from '../failure.mjs';
import { checkStream } from './bitstream.mjs';

const SECONDS = 300;
const MEMORY_KIB = 4 * 2 ** 20;
const FILLER = 128;

let found = null;

export function available() {
  return (found ??= probe());
}

function probe() {
  const { status, stdout } = spawnSync('ffmpeg', ['-hide_banner', '-decoders'], { encoding: 'utf8', timeout: 30_000 });
  return status === 0 && / hevc /.test(stdout);
}

export async function decode(payload, shape, where, verify) {
  const { layout } = shape;
  checkStream(payload, layout, where);
  const raw = await pictures(payload, 3 * layout.frames * layout.width * layout.height, where);
  return collect(raw, shape, layout, where, verify);
}

/** All samples, picture by picture, plane by plane. */
function pictures(stream, size, where) {
  const bad = (detail) => new Failure('segment.bitstream', where, detail);
  // No -pix_fmt and no scaling: a conversion by colour range would change samples (HEV-14). "crccheck" compares the
  // MD5 digests, "explode" and -xerror turn damage into an error instead of concealing it (HEV-8).
  const command = ['ffmpeg', '-nostdin', '-hide_banner', '-v', 'error', '-xerror', '-protocol_whitelist', 'pipe',
    '-threads', '1', '-err_detect', 'crccheck+bitstream+buffer+explode', '-flags', '-output_corrupt',
    '-f', 'hevc', '-i', 'pipe:0', '-map', '0:v:0', '-fps_mode', 'passthrough', '-autoscale', '0',
    '-c:v', 'rawvideo', '-f', 'rawvideo', 'pipe:1'];
  return new Promise((resolve, reject) => {
    const child = spawn('/bin/sh', ['-c', `ulimit -v ${MEMORY_KIB} 2>/dev/null; ulimit -t ${SECONDS}; exec "$@"`, 'sh', ...command],
      { stdio: ['pipe', 'pipe', 'pipe'], timeout: SECONDS * 1000, killSignal: 'SIGKILL' });
    const out = Buffer.allocUnsafe(size);
    let have = 0;
    let errors = '';
    let failure = null;
    child.stdout.on('data', (chunk) => {
      if (chunk.length > size - have) {
        failure = bad(`more than ${size} samples (HEV-2)`);
        child.kill('SIGKILL');
        return;
      }
      out.set(chunk, have);
      have += chunk.length;
    });
    child.stderr.on('data', (chunk) => { errors = (errors + chunk).slice(0, 500); });
    child.stdin.on('error', () => {}); // a decoder that gives up closes its input
    child.on('error', (error) => reject(new Failure('codec.unavailable', where, `ffmpeg: ${error.message}`)));
    child.on('close', (status, signal) => {
      if (failure) reject(failure);
      else if (status === 127 || status === 126) reject(new Failure('codec.unavailable', where, `ffmpeg: ${errors}`));
      else if (status !== 0 || errors) reject(bad(`the decoder failed: ${errors || signal || status}`.replace(/\s+/g, ' ')));
      else if (have !== size) reject(bad(`expected ${size} samples, found ${have} (HEV-2)`));
      else resolve(out);
    });
    child.stdin.end(stream);
  });
}

/** Samples to integers. Row and column of a sample are each a sum of a part of the token and one of the channel. */
function collect(raw, { n, N, heads, D, order }, layout, where, verify) {
  const { fold: [fh, fw], grid: [gr, gc], tile: [th, tw], width, height, frames: F } = layout;
  const channel = new Uint32Array(heads * D);
  for (let k = 0; k < channel.length; k++) channel[k] = Math.floor(k / tw) * fh * width + (k % tw) * fw;
  const plane = width * height;
  const out = Buffer.allocUnsafe(n * N * heads * D);
  for (let t = 0; t < N; t++) {
    const b = t % (fh * fw);
    const g = Math.floor(t / (fh * fw));
    const [f, site] = layout.order === 'time' ? [g % F, Math.floor(g / F)] : [Math.floor(g / (gr * gc)), g % (gr * gc)];
    const y = Math.floor(site / gc) * th * fh + Math.floor(b / fw);
    const x = (site % gc) * tw * fw + (b % fw);
    for (let p = 0; p < n; p++) {
      const from = (3 * f + p) * plane + y * width + x;
      const to = (p * N + t) * heads * D;
      for (let h = 0, k = 0; h < heads; h++) {
        for (let rank = 0; rank < D; rank++, k++) {
          const dim = order === null ? rank : order[(p * heads + h) * D + rank];
          out[to + h * D + dim] = raw[from + channel[k]];
          if (verify) raw[from + channel[k]] = FILLER; // then every sample must be filler (LAY-6)
        }
      }
    }
  }
  if (verify) check(raw.every((s) => s === FILLER), 'segment.filler', where, 'an unused sample is not 128');
  return out;
}
