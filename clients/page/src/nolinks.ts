/** In place of `linkify-it`: a text that looks like an address stays text. */

export class LinkifyIt {}
