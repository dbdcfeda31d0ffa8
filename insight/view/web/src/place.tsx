// Addresses of the page: which page of which run the part behind "#" names, and how to go there.

import type { ComponentChildren } from "preact";

export interface Place {
  page: string;
  run: string;
  key: string;
  given: Record<string, string>;
}

type Target = Partial<Place> & { page: string; run: string };

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    // An address that was typed by hand need not be encoded.
    return part;
  }
}

export function parse(hash: string): Place {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [page = "", run = "", key = ""] = path.split("/").map(decoded);
  return { page: page || "run", run, key, given: Object.fromEntries(new URLSearchParams(query)) };
}

export function address(place: Target): string {
  const query = new URLSearchParams(Object.entries(place.given ?? {}).filter(([, value]) => value !== ""));
  const parts = [place.page, place.run, ...(place.key ? [place.key] : [])].map(encodeURIComponent);
  return `#/${parts.join("/")}${query.size ? `?${query}` : ""}`;
}

export function go(place: Target, replace = false): void {
  if (replace) history.replaceState(null, "", address(place));
  else history.pushState(null, "", address(place));
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

// Why a page cannot be shown, and where to go on.
export function Missing({ why, to, title }: { why: ComponentChildren; to: Target; title: ComponentChildren }) {
  return <main class="page"><p class="problem">{why}; <a href={address(to)}>{title}</a></p></main>;
}
