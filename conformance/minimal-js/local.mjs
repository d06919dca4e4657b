// SPDX-License-Identifier: Apache-2.0
// Ranges of a local file.
import { open, stat } from 'node:fs/promises';
import { Failure, check } from './failure.mjs';

export class LocalFile {
  #path;
  #file = null;
  size = null;

  constructor(path) {
    this.#path = path;
  }

  /** The first bytes, at most `length`. */
  async open(length) {
    try {
      check((await stat(this.#path)).isFile(), 'io.read', this.#path, 'not a regular file'); // to open a pipe would wait
      this.#file = await open(this.#path, 'r');
      this.size = (await this.#file.stat()).size;
    } catch (error) {
      if (error instanceof Failure) throw error;
      const code = { ENOENT: 'io.not-found', EACCES: 'io.denied', EPERM: 'io.denied' }[error.code] ?? 'io.read';
      throw new Failure(code, this.#path, error.message);
    }
    return this.fetch(0, [Math.min(length, this.size)]);
  }

  /** Bytes from `offset` to the last of `stops`. */
  async fetch(offset, stops) {
    const length = stops.at(-1) - offset;
    const out = Buffer.allocUnsafe(length);
    for (let have = 0; have < length;) {
      const { bytesRead } = await this.#file.read(out, have, length - have, offset + have).catch((error) => {
        throw new Failure('io.read', this.#path, error.message);
      });
      check(bytesRead > 0, 'io.short', this.#path, `${have} of ${length} bytes from offset ${offset}`);
      have += bytesRead;
    }
    return out;
  }

  async endsAt(offset) {
    return this.size === offset;
  }

  async close() {
    await this.#file?.close();
  }
}
