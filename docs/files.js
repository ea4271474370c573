// On GitHub Pages, files that are not pages are shown by github.com.
"use strict";
{
  const [owner, host] = location.hostname.split(/\.(.*)/);
  const repository = `https://github.com/${owner}/${location.pathname.split("/")[1]}/blob/HEAD/`;
  const links = host === "github.io" ? document.querySelectorAll("main a, p a") : [];
  for (const link of links) {
    const path = link.getAttribute("href");
    if (/^[a-z]+:|^#|\.html(#|$)/.test(path)) continue;
    link.href = repository + (path.startsWith("../") ? path.slice(3) : `docs/${path}`);
  }
}
