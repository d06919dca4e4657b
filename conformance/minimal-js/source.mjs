// SPDX-License-Identifier: Apache-2.0
// Bytes of an artifact by range (section 11.1). Objects that are read one after the other and lie side by side come
// in one request, if the reader has said what it will read.
import { fileURLToPath } from 'node:url';
import { Failure } from './failure.mjs';
import { HttpObject } from './http.mjs';
import { LocalFile } from './local.mjs';
import { align } from './semantics.mjs';

export const FIRST_BYTES = 262_144;
const PREFETCH_BYTES = 64 * 2 ** 20;
const RUN_BYTES = 16 * 2 ** 20; // of joined objects that are held at a time
const OVERHEAD = 1.05; // REQ-12

export async function openSource(url, timeoutSeconds) {
  const storage = /^https?:\/\//i.test(url) ? new HttpObject(url, timeoutSeconds) : new LocalFile(localPath(url));
  try {
    const head = await storage.open(FIRST_BYTES);
    return new Source(storage, head);
  } catch (error) {
    await storage.close();
    throw error;
  }
}

function localPath(url) {
  if (!/^file:/i.test(url)) return url;
  try {
    return fileURLToPath(url);
  } catch (error) {
    throw new Failure('usage.argument', url, error.message);
  }
}

class Source {
  #storage;
  #plan = null; // iterator over the ranges that will be read
  #alignment = 1; // of the objects planned
  #next = null; // the first of them that has not been asked for
  #run = { start: 0, stop: 0, bytes: null }; // what the last joined request brought

  constructor(storage, head) {
    this.#storage = storage;
    this.head = head; // bytes from offset 0 that are already here (REQ-1)
    this.size = storage.size; // of the whole artifact, null if unknown
  }

  /** The first reply was short without a total size: whether the artifact ends there shows in its header (REQ-3). */
  get endsUnknown() {
    return this.size === null && this.head.length < FIRST_BYTES;
  }

  /** Fetch the front up to `end` in one more request, or the first part of a very large one. */
  async prefetch(end) {
    const stop = Math.min(end, PREFETCH_BYTES);
    if (stop > this.head.length) this.head = await this.read(0, stop);
  }

  /** Does the artifact end at `offset`, its file_bytes? */
  async endsAt(offset) {
    if (this.endsUnknown) return this.head.length === offset;
    return this.#storage.endsAt(offset);
  }

  /** `ranges`, an async iterable of [start, stop] of objects at multiples of `alignment`, are what will be read, in this order. */
  async plan(ranges, alignment) {
    this.#alignment = alignment;
    this.#plan = ranges[Symbol.asyncIterator]();
    await this.#advance();
  }

  async #advance() {
    do {
      const { done, value } = await this.#plan.next();
      this.#next = done ? null : [Math.max(value[0], this.head.length), value[1]];
    } while (this.#next && this.#next[0] >= this.#next[1]);
  }

  /** Exactly these bytes. The caller has checked `length` against the limits (ORD-4). */
  async read(offset, length) {
    const stop = offset + length;
    if (stop <= this.head.length) return this.head.subarray(offset, stop);
    if (offset < this.head.length) {
      const rest = await this.read(this.head.length, stop - this.head.length);
      return Buffer.concat([this.head.subarray(offset), rest]);
    }
    if (length === 0) return Buffer.alloc(0);
    if (this.#next && offset === this.#next[0] && stop === this.#next[1]) await this.#fetchRun();
    const run = this.#run;
    if (offset >= run.start && stop <= run.stop) return run.bytes.subarray(offset - run.start, stop - run.start);
    return this.#storage.fetch(offset, [stop]);
  }

  async #fetchRun() {
    const [start, stop] = this.#next;
    const stops = [stop];
    let needed = stop - start; // and padding between, which does not count (REQ-12)
    for (await this.#advance(); this.#next; await this.#advance()) {
      const [from, to] = this.#next;
      const joined = to - start;
      const needs = needed + to - (from === align(stops.at(-1), this.#alignment) ? stops.at(-1) : from);
      if (from < stops.at(-1) || joined > RUN_BYTES || joined > OVERHEAD * needs) break;
      needed = needs;
      stops.push(to);
    }
    this.#run = { start: 0, stop: 0, bytes: null }; // free it before the next one
    this.#run = { start, stop: stops.at(-1), bytes: await this.#storage.fetch(start, stops) };
  }

  close() {
    return this.#storage.close();
  }
}
